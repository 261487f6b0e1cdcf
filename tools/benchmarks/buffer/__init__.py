"""What tools/benchmark_buffer.py is made of."""
