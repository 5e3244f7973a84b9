"""One file per verb of the `titanlite` command (`train` is train.py). Programs may import all modules."""
