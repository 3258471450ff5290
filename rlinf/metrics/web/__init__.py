"""`rlinf watch`: the server of the page that shows runs, while they go on and afterwards.

It reads run directories, and listens to the feed of a job that lives. It is a process of its own: what it does costs
the job nothing but what its feed tells.
"""
