"""One file per verb of the `titanlite` command, except `train`, which is train.py. These are programs: they may import every other module."""
