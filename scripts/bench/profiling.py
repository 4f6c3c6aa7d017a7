"""`--profile`: long blocks, once as they are and once with a timer in the hub and in a worker, and what it saw."""

from pathlib import Path

from bench.contenders import Contender
from bench.member import HUB
from bench.payload import SIZES_BYTES
from bench.profile import functions, lines
from bench.report import rounds_of
from bench.team import Team

BLOCK_S = 4.0
PROBE_ROUNDS, WARM_UP = 20, 10
FEWEST, MOST = 30, 5000  # rounds of a block
SHOWN = 16
ROLES = {HUB: "hub", 0: "worker"}


def profile(folder: Path, contenders: dict[str, Contender], workers: list[int], sizes: list[str]) -> None:
    """Stacks go to ``folder``. Contenders without a hub have no loop of ours to look into."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contender in contenders.items():
        if not (contender.hub and contender.ranks) or contender.lacks():
            continue
        for count in workers:
            with Team(contender, count) as team:
                team.start()
                for size in sizes:
                    _profile(team, f"{name}, {count} workers, {size}", SIZES_BYTES[size], folder)


def _profile(team: Team, title: str, size_bytes: int, folder: Path) -> None:
    probe = rounds_of(team.block(size_bytes, PROBE_ROUNDS), WARM_UP)
    rounds = max(FEWEST, min(MOST, int(BLOCK_S / min(probe))))
    plain_ms = _median_ms(team, size_bytes, rounds, {})
    costs = team.costs
    stem = title.replace(", ", "-").replace(" ", "")
    paths = {rank: folder / f"{stem}-{role}.txt" for rank, role in ROLES.items()}
    profiled_ms = _median_ms(team, size_bytes, rounds, paths)
    print(f"## {title}\n\n{plain_ms:.3f} ms a round; {profiled_ms:.3f} ms while profiled.\n")
    for rank, role in ROLES.items():
        loop_ms, others_ms = (1000 * costs[rank][key] / rounds for key in ("loop_s", "others_s"))
        print(f"{role}: processor time a round {loop_ms:.3f} ms in its loop, {others_ms:.3f} ms in other threads")
        for heading, found in (("by line", lines(paths[rank])), ("by function, with callees", functions(paths[rank]))):
            print(f"    {heading}:")
            print("\n".join(f"        {share:5.1%}  {what}" for share, what in found[:SHOWN]))
        print(flush=True)


def _median_ms(team: Team, size_bytes: int, rounds: int, paths: dict[int, Path]) -> float:
    taken = sorted(
        rounds_of(team.block(size_bytes, rounds, {rank: str(path) for rank, path in paths.items()}), WARM_UP)
    )
    return 1000 * taken[len(taken) // 2]
