"""A run, put together from its flags: the only part that knows trainer, engines and tasks at once."""
