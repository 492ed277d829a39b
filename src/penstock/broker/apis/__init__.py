"""What the broker answers: one file per family of APIs, and the table of all of them.

A handler takes the broker, the decoded request and its context, and returns the response or an
awaitable of it. Produce and Fetch, the hot path, take the undecoded frame and answer their slot
themselves. What is not in the table is refused; what is in it is tested.
"""
