"""The parts of tools/simulate_draw.py."""
