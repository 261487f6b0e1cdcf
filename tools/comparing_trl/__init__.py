"""The parts of tools/compare_trl.py."""
