"""OLMo-core 3.0.0 on random tokens: its configurations for the comparisons of benchmarks/throughput.py
(configs.py), stand-ins for packages that cannot simply be copied to a machine (compat.py), and its start
(train.py). The files of OLMo-core are used as released. It is made for torch 2.10 to 2.13."""

PARAMETERS = {
    "llama3_125m": 297_689_856,
    "llama3_1b": 1_498_482_688,
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_30b_a3b_8layers": 5_510_303_744,
}
"""The number of parameters of each configuration, equal in both programs: tests/unit/test_throughput.py
checks titanlite's models, train.py OLMo-core's."""
