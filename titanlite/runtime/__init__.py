"""The process and its devices, distributed set-up, signals, and the launcher's side of them."""
