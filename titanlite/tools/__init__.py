"""One file a verb of the `titanlite` command. Programs: they may import anything and nobody imports them."""
