"""Load balance of expert-parallel ranks: as loaded, with experts moved, and with copies of the hot ones.

python benchmarks/expert_placement.py             # expert i is chosen in proportion to 1 / i: few are hot
python benchmarks/expert_placement.py --power 0.5
"""

from __future__ import annotations

import argparse
import random
import time

from quire.layers.expert_placement import Placement, moves, place

CASES = ((8, 2, 2), (60, 4, 4), (128, 8, 8), (128, 16, 16), (256, 64, 64))
"""(experts, ranks, spare slots)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--power", type=float, default=1.0, help="0: uniform load; higher: more skewed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print("max ÷ mean load of ranks\nexperts  ranks  spare  as loaded  moved  with copies  copied   took")
    for experts, ranks, spare in CASES:
        counts = [round(1e5 / (i + 1) ** args.power) for i in range(experts)]
        rng.shuffle(counts)
        plain, roomy = Placement.even(experts, ranks), Placement.even(experts, ranks, spare)
        begin = time.perf_counter()
        copied = place(counts, roomy)
        took = time.perf_counter() - begin
        skews = [each.skew(counts) for each in (plain, place(counts, plain), copied)]
        print(
            f"{experts:7}  {ranks:5}  {spare:5}  {skews[0]:9.2f}  {skews[1]:5.2f}  {skews[2]:11.2f}  "
            f"{len(moves(roomy, copied)):6}  {1e3 * took:4.0f} ms"
        )


if __name__ == "__main__":
    main()
