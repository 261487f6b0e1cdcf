"""What tools/benchmark_loss.py is made of."""
