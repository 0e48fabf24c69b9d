"""`exo run`: answers and conversations in the terminal."""
