"""A server that speaks OpenAI's and Anthropic's protocols, whose every call is recorded as by `llm.chat`.

`endpoint` listens and knows whose key a request shows, `app` takes it through limits to its route, `requests` checks it
and asks the model, `openai` and `anthropic` read and write the protocols.
"""
