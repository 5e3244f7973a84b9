"""Where a GPU spends the time of a traced step: its kernels by name, the gaps of the stream that computes,
and what other streams did meanwhile.

    python benchmarks/trace_kernels.py RUN/profile/trace-step-12-rank-0.json.gz > NAME.txt

The trace is one of `profiling.enable_profiling`. Times of kernels are milliseconds over all traced steps."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_KERNELS, NUM_GAPS, NUM_PAIRS = 70, 25, 20
LONG_US = 300  # gaps from this length on are listed one by one
SLICE_US = 20e3


def main() -> None:
    """Print the tables of a trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    path = parser.parse_args().trace
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in ON_GPU]
    if not events:
        sys.exit(f"{path} has no work of a GPU")
    print_kernels(events)
    print_gaps(events)


def print_kernels(events: list[dict[str, Any]]) -> None:
    """The kernels that took longest: milliseconds, number of calls, name."""
    times, calls, streams = defaultdict[str, float](float), defaultdict[str, int](int), defaultdict(float)
    for event in events:
        name, ms = event["name"][:110], event["dur"] / 1e3
        times[name] += ms
        calls[name] += 1
        streams[event["args"].get("stream")] += ms
    first = min(event["ts"] for event in events)
    last = max(event["ts"] + event["dur"] for event in events)
    print("span ms", (last - first) / 1e3, "streams", dict(streams))
    for name, ms in sorted(times.items(), key=lambda item: -item[1])[:NUM_KERNELS]:
        print(f"{ms:9.2f} {calls[name]:6d} {name}")


def print_gaps(events: list[dict[str, Any]]) -> None:
    """The gaps of the busiest stream: the longest, those between kernels of two names together, and the idle
    share of each 20 ms."""
    streams = defaultdict(list)
    for event in events:
        begin = event["ts"]
        streams[event["args"].get("stream")].append((begin, begin + event["dur"], event["name"]))
    busiest = max(streams, key=lambda stream: sum(end - begin for begin, end, _ in streams[stream]))
    own = sorted(streams.pop(busiest))
    others = sorted(item for items in streams.values() for item in items)
    start = min(event["ts"] for event in events)
    pairs, long = defaultdict[tuple[str, str], list[float]](list), []
    _, end, before = own[0]
    for begin, finish, name in own[1:]:
        if begin > end:
            pairs[before[:40], name[:40]].append(begin - end)
            if begin - end > LONG_US:
                meanwhile = defaultdict[str, float](float)
                for other_begin, other_end, other in others:
                    meanwhile[other[:36]] += max(min(other_end, begin) - max(other_begin, end), 0)
                most = sorted(meanwhile.items(), key=lambda item: -item[1])[:3]
                about = {other: round(us) for other, us in most if us}
                long.append((begin - end, (end - start) / 1e3, before[:50], name[:50], about))
        if finish > end:
            end, before = finish, name
    all_gaps = [gap for gaps in pairs.values() for gap in gaps]
    print("main stream", busiest, "first at ms", (own[0][0] - start) / 1e3, "last", (end - start) / 1e3,
          "sum of gaps ms", sum(all_gaps) / 1e3, "gaps", len(all_gaps))  # fmt: skip
    for gap, at, first, then, about in sorted(long, key=lambda item: -item[0])[:NUM_GAPS]:
        print(f"  big gap us {gap:.0f} at ms {at:.1f}: {first} -> {then} | {about}")
    for pair, gaps in sorted(pairs.items(), key=lambda item: -sum(item[1]))[:NUM_PAIRS]:
        print(f"  {sum(gaps) / 1e3:8.2f} ms {len(gaps):5d}x {pair}")
    busy = [0.0] * (int((end - start) / SLICE_US) + 1)
    for begin, finish, _ in own:
        while begin < finish:
            i = int((begin - start) / SLICE_US)
            until = min(finish, start + (i + 1) * SLICE_US)
            busy[i] += until - begin
            begin = until
    print("idle% per 20 ms:", [round(100 - 100 * us / SLICE_US) for us in busy])
    nccl = sum(finish - begin for begin, finish, name in others if "nccl" in name)
    print("nccl total ms", nccl / 1e3)


if __name__ == "__main__":
    main()
