"""One run put together: its job, warm start, the reference's weights, commit and resume, how far it has come."""
