"""One step as a text drawing: gradients from the workers to the parameter server, weights from it to the workers."""

from collections.abc import Mapping

WORKERS_SHOWN = 6


def picture(
    work: Mapping[str, str], before: str, after: str, formula: str, examples: str, optimizer: str | None
) -> str:
    """The step from version `before` to `after`.

    work: what each worker computed; formula: the tree of sums; examples: what the total is divided by; optimizer: None
    if the gradient was not applied.
    """
    names = list(work) or ["nobody known"]
    senders = [f"{name}  {what}" for name, what in work.items()] or names
    if len(names) > WORKERS_SHOWN:
        more = f"and {len(names) - WORKERS_SHOWN + 1} more"
        names, senders = [*names[: WORKERS_SHOWN - 1], more], [*senders[: WORKERS_SHOWN - 1], more]
    receivers = ", ".join(names)
    width = max(len(receivers), *map(len, senders))
    arrows = [" --."] * (len(senders) - 1) + [" --+-- PUSH --> "] if len(senders) > 1 else [" ----- PUSH --> "]
    centre = 2 + width + len(arrows[-1]) + 1
    stages = [
        (f"the tree {formula}", "sums are added in this order, whoever came first"),
        (f"/ {examples}", "the mean gradient"),
        (optimizer, f"version {before} becomes {after}: the only place where weights change")
        if optimizer
        else ("not applied", f"version {after} has the weights of version {before}"),
    ]
    lines = [(f"  {sender:<{width}}{arrow}", "") for sender, arrow in zip(senders, arrows, strict=True)]
    lines[-1] = (lines[-1][0] + "PULL", f"sums of gradients, computed from version {before}")
    for text, meaning in stages:
        lines += [(" " * centre + "|", ""), (" " * max(2, centre - len(text) // 2) + text, meaning)]
    lines += [
        (" " * centre + "|", ""),
        (f"  {receivers:<{width}} <---- SUB --- PUB", f"version {after}; every worker overwrites its copy"),
    ]
    column = max(len(drawn) for drawn, meaning in lines if meaning) + 3
    return "\n".join(f"{drawn:<{column}}{meaning}".rstrip() for drawn, meaning in lines)
