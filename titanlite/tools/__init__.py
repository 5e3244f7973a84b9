"""One file per verb of the `titanlite` command; the verb `train` is train.py. They may import every module."""
