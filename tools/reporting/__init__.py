"""The parts of tools/report.py."""
