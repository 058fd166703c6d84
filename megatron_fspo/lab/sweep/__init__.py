"""Several runs from one file: arms × seeds, some of them at a matched clip rate, and what came of them."""
