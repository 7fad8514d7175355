"""A run put together: what it will be, its job, how far it has come."""
