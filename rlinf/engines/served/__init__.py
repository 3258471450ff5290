"""Engines around an inference server: a supervised child process, HTTP, and answers kept on this side.

`engine` is the `Engine`, `server` the child and the protocol that a kind of server has (`sglang`, `vllm`),
`shared_memory` takes weights into it.
"""
