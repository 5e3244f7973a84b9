"""One file per verb of the `titanlite` command. These are programs: they may import every other module."""
