"""Text completion with a real model, one prompt at a time against batched.

Many threads each send one prompt after another to a model in a worker process. The first part measures tokens per
second and latency over the number of callers, the second sends prompts with different settings at once. Exit status: 0
if batched answers are the unbatched ones for 19 of 20 prompts or more, 1 if not, 2 if the model is missing.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from batch_inference import ModelHost
from tutorials.common import Panel, Run, closed_loop, draw, machine, progress_bar
from tutorials.gpt_completion.completion_model import CompletionModel, Tokenizer, Wish, complete
from tutorials.gpt_completion.weights import DEFAULT, resolve

PROMPTS = Path(__file__).with_name("prompts.txt")
HEADLINE = 16  # callers at which batched and unbatched are compared
MAX_BATCH_SIZE = 32
SHARE = 0.95  # of the prompts that must have the same answer: a tie may be decided by the last digit of a sum


class Bench:
    """Sends the prompts, again and again in their order, all with one wish; gets (index of the prompt, tokens)."""

    def __init__(self, host: ModelHost, prompts: Sequence[np.ndarray], wish: Wish, progress: Progress) -> None:
        self.host = host
        self.prompts = prompts
        self.wish = wish
        self.progress = progress

    def measure(self, title: str, callers: int, count: int) -> Run:
        def ask(request: tuple[int, Wish]) -> tuple[int, list[int]]:
            index, wish = request
            return index, complete(self.host, self.prompts[index], wish)

        requests = [(index % len(self.prompts), self.wish) for index in range(count)]
        short = replace(self.wish, max_new_tokens=2)
        warmup = [(index, short) for index, _ in requests[:callers]]
        task = self.progress.add_task(f"{title}, {callers} callers", total=count)
        advance = functools.partial(self.progress.advance, task)
        return closed_loop(ask, requests, callers, warmup=warmup, host=self.host, done=advance)


def tokens_per_second(run: Run) -> float:
    return sum(len(tokens) for _, tokens in run.answers) / run.seconds


def measure_all(bench: Bench, callers: Sequence[int], repeat: int) -> tuple[Run, dict[int, Run]]:
    """The unbatched run at HEADLINE callers, and the batched ones by number of callers. The unbatched run is
    between the two halves of the one that it is compared with, so that a load that grows or falls hits both."""
    half = bench.measure("batched", HEADLINE, repeat * HEADLINE)
    bench.host.configure(max_batch_size=1)
    unbatched = bench.measure("unbatched", HEADLINE, len(bench.prompts))
    bench.host.configure(max_batch_size=MAX_BATCH_SIZE)
    batched = {HEADLINE: half + bench.measure("batched", HEADLINE, repeat * HEADLINE)}
    for count in callers:
        if count != HEADLINE:
            batched[count] = bench.measure("batched", count, max(3, count))
    return unbatched, dict(sorted(batched.items()))


def results(unbatched: Run, batched: dict[int, Run]) -> Table:
    table = Table(title="Completion over the number of callers")
    for title in ("", "callers", "tokens/s", "latency p50", "latency p99", "mean batch"):
        table.add_column(title, justify="right")
    runs = [("unbatched", HEADLINE, unbatched)] + [("batched", count, run) for count, run in batched.items()]
    for name, count, run in runs:
        latency = [f"{run.percentile(percent):.2f} s" for percent in (50, 99)]
        table.add_row(name, str(count), f"{tokens_per_second(run):.0f}", *latency, f"{run.mean_batch:.1f}")
    return table


def panels(unbatched: Run, batched: dict[int, Run]) -> list[Panel]:
    counts = list(batched)
    return [
        Panel(
            "tokens per second",
            {
                "unbatched": ([HEADLINE], [tokens_per_second(unbatched)]),
                "batched": (counts, [tokens_per_second(run) for run in batched.values()]),
            },
        ),
        Panel(
            "latency p50, seconds",
            {
                "unbatched": ([HEADLINE], [unbatched.percentile(50)]),
                "batched": (counts, [run.percentile(50) for run in batched.values()]),
            },
        ),
    ]


def same_answers(unbatched: Run, batched: dict[int, Run]) -> int:
    """To how many prompts every batched answer is the unbatched one."""
    alone = dict(unbatched.answers)
    differ = {index for run in batched.values() for index, tokens in run.answers if tokens != alone[index]}
    return len(alone) - len(differ)


def mixed_wishes(tokenizer: Tokenizer, tokens: int) -> list[Wish]:
    """One batch holds all of these."""
    stop = tokenizer.token(".")
    return [
        Wish(tokens),
        Wish(max(1, tokens // 4)),
        Wish(tokens, stop=stop),
        Wish(tokens, temperature=0.7, seed=1),
        Wish(tokens, temperature=0.7, seed=2),
        Wish(tokens, temperature=1.0, stop=stop, seed=3),
    ]


def show_mixed(console: Console, host: ModelHost, tokenizer: Tokenizer, text: str, wishes: Sequence[Wish]) -> int:
    """Continues one prompt with all wishes at once and prints it; returns for how many the answer differs from the one
    that the same request gets alone."""
    prompt = tokenizer(text)
    requests = [(prompt, wish) for wish in wishes]
    before = host.statistics().batches
    together = closed_loop(lambda request: complete(host, *request), requests, len(requests)).answers
    batches = host.statistics().batches - before
    host.configure(max_batch_size=1)
    alone = [complete(host, *request) for request in requests]
    host.configure(max_batch_size=MAX_BATCH_SIZE)
    console.print(f"\n{len(wishes)} requests with different settings, sent at once and answered in {batches} batches:")
    for wish, tokens in zip(wishes, together):
        settings = f"at most {wish.max_new_tokens}"
        settings += f", temperature {wish.temperature}, seed {wish.seed}" if wish.temperature else ", greedy"
        settings += ", up to the first full stop" if wish.stop >= 0 else ""
        console.print(f"  [bold]{settings}[/bold] ({len(tokens)} tokens)")
        console.print(f"    {text}{tokenizer.text(tokens)}".replace("\n", " "), markup=False)
    return sum(one != other for one, other in zip(together, alone))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default=DEFAULT,
        help="a folder, or a name on the Hugging Face hub, such as gpt2 (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=32, help="tokens for each prompt (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument(
        "--repeat", type=int, default=2, help=f"requests of each of {HEADLINE} callers, twice (default: %(default)s)"
    )
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32], metavar="N", help=f"besides {HEADLINE}")
    parser.add_argument("--threads", type=int, help="compute threads of the model (default: as many as cores)")
    figure = Path(".cache") / "gpt_completion.svg"
    parser.add_argument("--figure", type=Path, default=figure, help="where to draw it (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(highlight=False)
    # The default model comes with a package. Another name may have to be fetched, whatever scripts/demo says.
    os.environ["HF_HUB_OFFLINE"] = "1" if arguments.model == DEFAULT else "0"
    try:
        console.print(f"Model: {arguments.model} (the first time its weights are converted, for half a minute or so)")
        source = resolve(arguments.model)
    except FileNotFoundError as error:
        console.print(str(error), style="red")
        return 2
    tokenizer = Tokenizer(source)
    texts = PROMPTS.read_text("utf-8").splitlines()[: arguments.limit]
    prompts = [tokenizer(text) for text in texts]
    console.print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens; {machine()}")

    host = ModelHost(CompletionModel, threads=arguments.threads, max_batch_size=MAX_BATCH_SIZE)(source)
    with host:
        with progress_bar(console) as progress:
            bench = Bench(host, prompts, Wish(arguments.tokens), progress)
            unbatched, batched = measure_all(bench, arguments.callers, arguments.repeat)
        console.print(results(unbatched, batched))
        factor = tokens_per_second(batched[HEADLINE]) / tokens_per_second(unbatched)
        console.print(f"Batched: {factor:.1f} times the tokens per second at {HEADLINE} callers; {machine()}.")
        differ = show_mixed(console, host, tokenizer, texts[0], mixed_wishes(tokenizer, arguments.tokens))

    draw(arguments.figure, panels(unbatched, batched))
    same = same_answers(unbatched, batched)
    held = same >= SHARE * len(prompts) and differ <= 1
    verdict = "[green]equal[/green]" if held else "[red]NOT equal[/red]"
    console.print(f"\nBatched and unbatched answers are {verdict}: {same} of {len(prompts)} prompts", end=" ")
    console.print(f"have the same greedy tokens in all runs, {differ} of the mixed requests differ.")
    console.print(f"Figure: {arguments.figure}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
