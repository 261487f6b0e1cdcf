"""Operators: a public function per op, a torch reference, and faster twins that `backend.resolve` chooses."""
