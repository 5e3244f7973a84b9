"""torchtitan 0.3.0 on random tokens: its configurations for the comparisons of benchmarks/throughput.py and
benchmarks/start.py (config_registry.py), what it needs of newer versions of torch (compat.py), and its start
(train.py). The files of torchtitan are used as released; before torch 2.14, compat.py replaces some functions
of torch and of torchtitan in the running program."""
