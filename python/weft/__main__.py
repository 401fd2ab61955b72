"""`python -m weft`: the program `weft` (run.py)."""
from .run import weft

weft()
