"""What tools/benchmark_loss.py and tools/benchmark_buffer.py are made of."""
