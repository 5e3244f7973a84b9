"""One file per verb of the `titanlite` command; `train` is train.py. They may import every module."""
