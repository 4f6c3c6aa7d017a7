"""Where and when the weights were updated: the ledger told in words, with a picture of the step.

Reads what a run has left behind, also while it goes on, and returns text. It needs neither JAX nor a running process.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from bus import tree
from gradbus.drawing import picture
from gradbus.records import Row, RunFolder, RunFolderError, read_rows
from gradbus.settings import Settings, SettingsError, load
from gradbus.wording import plural

WIDTH = 100
ROWS_SHOWN = 10
TREE_SHARDS = 16  # a sum over more shards than this is described, not written out

_OVERWRITTEN = (
    "No worker changed any weight: a worker computes gradients from a copy, and the copy is overwritten by what it "
    "receives next."
)


@dataclass(frozen=True)
class Story:
    """A run's ledger, sorted by what it tells. updates: by version, of the weights as they are now."""

    run: RunFolder
    settings: Settings
    updates: dict[int, Row]
    refused: list[Row]
    members: list[Row]
    sessions: list[Row]

    def name(self, member: object) -> str:
        """What a member called itself."""
        return next((str(row.get("name")) for row in self.members if row.get("member") == member), f"member {member}")

    def shares(self, row: Row) -> dict[str, list[tuple[int, int]]]:
        """The shards of an update by worker, as (first, last), neighbours joined."""
        found: dict[str, list[tuple[int, int]]] = {}
        for low, high, member in sorted(row.get("shards", [])):
            ranges = found.setdefault(self.name(member), [])
            if ranges and ranges[-1][1] == low - 1:
                ranges[-1] = (ranges[-1][0], high - 1)
            else:
                ranges.append((low, high - 1))
        return found


def explain_run(run: RunFolder, worker: str | None = None) -> str:
    """The run as a whole: who computed what, what was refused, the sessions, the last versions.

    worker: its name, to add what became of its work. Raises RunFolderError, one line, if the run does not know it.
    """
    story = _read(run)
    parts = [_outcome(story), _work(story), _refusals(story.refused, story), _sessions(story), _last_versions(story)]
    if worker is not None:
        parts.append(_career(story, worker))
    settings = story.settings
    names = {name: "some shards" for name in sorted(_totals(story))} or {"a worker": "some shards"}
    parts.append(picture(names, "v", "v+1", _formula(settings.train.shards), "the examples", _optimizer(settings)))
    return "\n\n".join(part for part in parts if part)


def explain_version(run: RunFolder, version: int, worker: str | None = None) -> str:
    """How one version was made; with `worker`, what became of its contribution to it. Raises RunFolderError."""
    story = _read(run)
    if version == 0:
        return _wrap(
            "Version 0 is the initial weights: made once, at the parameter server, by the workload's init from seed "
            f"{story.settings.seed}. No update has touched them."
        )
    row = story.updates.get(version)
    if row is None:
        there = f"versions {min(story.updates)} to {max(story.updates)}" if story.updates else "no update yet"
        raise RunFolderError(f"version {version} is not in the ledger of {run.path.name}, which has {there}")
    parts = [_made(story, row)]
    late = [refused for refused in story.refused if refused.get("version") == version - 1]
    if worker is not None:
        parts.append(_contribution(story, row, late, worker))
    elif late:
        parts.append(_refusals(late, story))
    shares = {name: _ranges(ranges) for name, ranges in story.shares(row).items()}
    examples = f"{row.get('examples')} examples"
    steps = (str(version - 1), str(version))
    optimizer = _optimizer(story.settings) if row.get("applied", True) else None
    parts.append(picture(shares, *steps, _formula(story.settings.train.shards), examples, optimizer))
    return "\n\n".join(parts)


def _read(run: RunFolder) -> Story:
    try:
        settings = load(run.config)
    except SettingsError as error:
        raise RunFolderError(f"the settings of the run cannot be read: {error}") from error
    kinds: dict[str, list[Row]] = {"refused": [], "member": [], "session": []}
    for row in read_rows(run.ledger):
        if (kind := row.get("kind")) in kinds:
            kinds[kind].append(row)
    return Story(run, settings, run.updates(), kinds["refused"], kinds["member"], kinds["session"])


def _outcome(story: Story) -> str:
    summary = story.run.read_summary()
    title = f"{story.settings.name}, {story.run.path}"
    if not summary:
        return f"{title}\nno summary yet: the run goes on, or it was killed"
    facts = [f"{summary.get('status')} at version {summary.get('version')}"]
    if summary.get("reason"):
        facts.append(str(summary["reason"]))
    if isinstance(loss := summary.get("loss"), float):
        facts.append(f"loss {loss:.4f}")
    facts += [f"{name} {value:.4f}" for name, value in (summary.get("eval") or {}).items()]
    return f"{title}\n{', '.join(facts)}"


def _totals(story: Story) -> Counter[str]:
    totals: Counter[str] = Counter()
    for row in story.updates.values():
        for low, high, member in row.get("shards", []):
            totals[story.name(member)] += high - low
    return totals


def _work(story: Story) -> str:
    if not story.updates:
        return "No update has been made yet: these are still the initial weights."
    train = story.settings.train
    first, last = min(story.updates), max(story.updates)
    skipped = sum(row.get("applied") is False for row in story.updates.values())
    text = (
        f"{plural(len(story.updates) - skipped, 'update')}, all at the parameter server, made versions {first} to "
        f"{last}. An update is the mean gradient over {train.batch_size} examples in {train.shards} shards, applied by "
        f"{_optimizer(story.settings)}. {_OVERWRITTEN}"
    )
    if skipped:
        text += f" In {plural(skipped, 'step')} the weights were left as they were, because a gradient was not finite."
    totals = _totals(story)
    refused = Counter(str(row.get("name")) for row in story.refused)
    hosts = {str(row.get("name")): str(row.get("host")) for row in story.members}
    joined = Counter(str(row.get("name")) for row in story.members if row.get("event") == "joined")
    rows = [
        [
            name,
            hosts.get(name, "?"),
            str(joined[name]),
            str(totals[name]),
            f"{totals[name] / max(1, totals.total()):.0%}",
            str(refused[name]),
        ]
        for name in sorted(totals | refused)
    ]
    head = ["worker", "host", "joined", "shards used", "share", "refused"]
    return f"{_wrap(text)}\n\n{_table(head, rows, left=2)}"


def _refusals(refused: Sequence[Row], story: Story) -> str:
    if not refused:
        return ""
    lines = [f"{plural(len(refused), 'contribution')} refused, and so without any effect on the weights:"]
    reasons = Counter(str(row.get("reason")) for row in refused)
    for reason, count in reasons.most_common(ROWS_SHOWN):
        last = next(row for row in reversed(refused) if str(row.get("reason")) == reason)
        what = f"{_what(last)} from {last.get('name') or story.name(last.get('member'))}, at {_when(last)}"
        lines.append(f"  {count} x {reason}  ({'last: ' if count > 1 else ''}{what})")
    if len(reasons) > ROWS_SHOWN:
        lines.append(f"  ... and {len(reasons) - ROWS_SHOWN} other reasons")
    return "\n".join(lines)


def _sessions(story: Story) -> str:
    if not story.sessions:
        return ""
    lines = ["Sessions, one for each life of the parameter server:"]
    for row in story.sessions:
        source = f", resumed from {row['resumed_from']}" if row.get("resumed_from") else ""
        lines.append(f"  {row.get('session')}  began at version {row.get('version')}, {_when(row)}{source}")
    return "\n".join(lines)


def _last_versions(story: Story) -> str:
    if not story.updates:
        return ""
    rows = []
    for version in sorted(story.updates)[-ROWS_SHOWN:]:
        row = story.updates[version]
        made_of = "; ".join(f"{name} {_ranges(ranges, short=True)}" for name, ranges in story.shares(row).items())
        rate, loss = _number(row.get("learning_rate")), _number(row.get("loss"))
        norms = [_number(row.get("gradient_norm")), _number(row.get("update_norm"))]
        clock = str(row.get("time", ""))[11:19]
        rows.append([str(version), clock, _shorten(made_of, 40), str(row.get("examples")), rate, loss, *norms])
    head = ["version", "time", "shards by", "examples", "rate", "loss", "|gradient|", "|update|"]
    return f"The last versions (times in UTC; |..| is the norm):\n{_table(head, rows, left=3)}"


def _made(story: Story, row: Row) -> str:
    settings, version, before = story.settings, row["version"], row.get("from_version", row["version"] - 1)
    shards, size = settings.train.shards, settings.train.batch_size // settings.train.shards
    computed = [f"{name} computed {_ranges(ranges)}" for name, ranges in story.shares(row).items()]
    sentences = [
        f"Version {version} was made at the parameter server, at {_when(row)}, from version {before} by one "
        f"{'update' if row.get('applied', True) else 'step'}: {plural(shards, 'shard')} of {plural(size, 'example')}.",
        f"From a copy of version {before}, {_list(computed)}, and pushed the sums of their gradients.",
        f"The parameter server added the sums over the tree {_formula(shards)}, whatever the order of arrival.",
    ]
    if row.get("left_out"):
        left_out = _ranges([(shard, shard) for shard in row["left_out"]])
        sentences.append(f"Left out, because their gradient was not finite: {left_out}.")
    norm = f", of norm {_number(row['gradient_norm'])}" if row.get("gradient_norm") is not None else ""
    sentences.append(f"The total was divided by {row.get('examples')} examples: the mean gradient{norm}.")
    if row.get("applied") is False:
        why = "one of the gradients" if row.get("left_out") else "it"
        sentences.append(
            f"It was not applied, because {why} was not finite: version {version} has the weights of version {before}."
        )
    else:
        rate = row.get("learning_rate")
        at = f" at rate {_number(rate)}" if rate is not None else ""
        sentences.append(
            f"Update {row.get('updates')}, by {_optimizer(settings)}{at}, moved the weights by norm "
            f"{_number(row.get('update_norm'))}."
        )
    sentences.append(f"The mean loss of these examples at version {before} was {_number(row.get('loss'))}.")
    sentences.append(f"Version {version} was then published to every worker. {_OVERWRITTEN}")
    if isinstance(seconds := row.get("seconds"), int | float):
        apply_s, bus_s = row.get("apply_seconds"), row.get("bus_seconds")
        of_it = f", of it applying the update {apply_s:.4f} s" if isinstance(apply_s, int | float) else ""
        sentences.append(f"The step took {seconds:.4f} s{of_it}.")
        if isinstance(bus_s, int | float):
            sentences.append(f"Before it the workers had nothing to compute for {bus_s:.4f} s: bus and update.")
    return _wrap(" ".join(sentences))


def _contribution(story: Story, row: Row, late: Sequence[Row], worker: str) -> str:
    """What became of a worker's work for one version."""
    _known(story, worker)
    version = row["version"]
    sentences = []
    if (ranges := story.shares(row).get(worker)) is not None:
        sentences.append(f"The work of {worker} on {_ranges(ranges)} was used: it is in version {version}.")
    for refused in (one for one in late if one.get("name") == worker):
        opened = refused.get("open_version")
        state = f", when step {opened} was open" if opened not in (None, version - 1) else ""
        what = f"A contribution of {worker}, {_what(refused)}, was refused at {_when(refused)}{state}"
        sentences.append(f"{what}: {refused.get('reason')}.")
    if not sentences:
        sentences.append(f"Nothing of {worker} is in version {version}, and nothing was refused.")
        before = [
            one for one in story.members if one.get("name") == worker and str(one.get("time")) <= str(row.get("time"))
        ]
        sentences.append(f"{_event(before[-1])}." if before else f"It had not joined by {_when(row)}.")
    return _wrap(" ".join(sentences))


def _career(story: Story, worker: str) -> str:
    """What became of all the work of a worker."""
    _known(story, worker)
    versions = [version for version, row in story.updates.items() if worker in story.shares(row)]
    lines = [
        f"{worker} has a part in {plural(len(versions), 'version')}"
        + (f", the last of them {max(versions)}:" if versions else ":")
    ]
    lines += [f"  {_event(row)}" for row in story.members if row.get("name") == worker][-ROWS_SHOWN:]
    refused = [row for row in story.refused if row.get("name") == worker]
    return "\n".join([*lines, *_refusals(refused, story).splitlines()])


def _known(story: Story, worker: str) -> None:
    names = sorted({str(row.get("name")) for row in story.members})
    if worker not in names:
        raise RunFolderError(f"no worker of this run was called {worker!r}; there were: {', '.join(names) or 'none'}")


def _event(row: Row) -> str:
    verbs = {"ready": "was ready", "lost": "was lost", "replaced": "was replaced"}
    event = verbs.get(str(row.get("event")), row.get("event"))
    reason = f": {row['reason']}" if row.get("reason") else ""
    return f"{row.get('name')} (member {row.get('member')}) {event} at {_when(row)}{reason}"


def _what(refused: Row) -> str:
    """The shards and the step of a refused contribution."""
    match refused.get("shards"):
        case [int(low), int(high)]:
            return f"{_ranges([(low, high - 1)])} of step {refused.get('version')}"
        case _:
            return f"step {refused.get('version')}"


def _formula(shards: int) -> str:
    """The tree over shards 0..V-1 as a sum with brackets."""
    if shards > TREE_SHARDS:
        return f"of {shards} shards"

    def term(node: tree.Node) -> str:
        return str(node[0]) if node[1] - node[0] == 1 else f"({'+'.join(map(term, tree.children(node)))})"

    return term(tree.root(shards))


def _optimizer(settings: Settings) -> str:
    chain = settings.optimizer.get("chain")
    calls: Sequence[Any] = chain if isinstance(chain, list) else [settings.optimizer]
    return " + ".join(str(call.get("name", "?")) for call in calls if isinstance(call, Mapping))


def _ranges(ranges: Sequence[tuple[int, int]], short: bool = False) -> str:
    """`shards 0-1 and 4`."""
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if short:
        return ",".join(texts)
    single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"shard{'' if single else 's'} {_list(texts)}"


def _when(row: Row) -> str:
    """`10:00:01 on 2026-12-01 (UTC)`."""
    day, _, clock = str(row.get("time", "?")).partition("T")
    return f"{clock[:8]} on {day} (UTC)" if clock else day


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "?"


def _list(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrap(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns under each other; the first `left` of them from the left, the others, numbers, from the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for cells in [head, *rows]:
        padded = [
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)
