"""The page on chat data, run as it is written, with a tiny model and few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ..architecture.doc_blocks import Block, find_blocks
from ..conftest import REPO

transformers = pytest.importorskip("transformers")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The Python blocks; the files of the page are in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPO / "examples")
    blocks = find_blocks((REPO / "docs" / "chat_data.md").read_text(encoding="utf-8"))
    for block in blocks:
        if block.file:
            Path(block.file).write_text(block.code)
    return [block for block in blocks if block.language == "python"]


def tiny(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> Any:
    import tiny_models  # type: ignore[import-not-found]

    tokenizer = tiny_models.train_tokenizer(texts)
    model = tiny_models.make_llama(tokenizer)
    for name, made in {"AutoTokenizer": tokenizer, "AutoModelForCausalLM": model}.items():
        monkeypatch.setattr(
            getattr(transformers, name), "from_pretrained", lambda _, made=made: made
        )
    return tokenizer


def test_script_of_the_page_trains_on_the_answers_and_resumes(page, monkeypatch, tmp_path):
    from draw_data import write_chats  # type: ignore[import-not-found]

    chats = tmp_path / "chats.jsonl"
    lines = chats.read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["messages"]] * 3
    write_chats(chats, 200)
    tokenizer = tiny(monkeypatch, chats.read_text().splitlines())
    script, count, look, validation = page

    code = script.code
    for old, new in {
        "max_steps=1000, save_steps=100, logging_steps=10": "max_steps=6, save_steps=4, "
        "logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True",
        "capacity=4096": "capacity=128",
        "num_streams=8": "num_streams=4",
        "num_workers=2": "num_workers=0",
    }.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    whole = names["trainer"]
    assert whole.state.global_step == 6
    assert Path("run/checkpoint-4/loader_state.json").is_file()

    weights = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    resume = "trainer.train(resume_from_checkpoint='run/checkpoint-4')\n"
    exec(code.replace("trainer.train()", f"{resume}#"), names)
    assert names["trainer"].state.global_step == 6
    for name, tensor in names["trainer"].model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name

    exec(look.code, names)
    for text in names["learned"]:
        answers = text.split("<|end|>")
        assert answers.pop() == ""
        assert answers
        assert all(answer.startswith("It is ") for answer in answers)

    write_chats(tmp_path / "val_chats.jsonl", 30)
    exec(validation.code.replace('"steps",', '"steps", use_cpu=True, report_to=[],'), names)
    losses = []
    model = names["model"].eval()
    for batch in names["get_savable_loader"](names["trainer"].eval_dataset):
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
    assert len(losses) > 1
    assert names["trainer"].evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses))

    exec(count.code, names)
    for line in chats.read_text().splitlines()[:20]:
        messages = json.loads(line)["messages"]
        chat = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        found = names["tokens_and_mask"](tokenizer, messages)
        assert found == (chat["input_ids"], chat["assistant_masks"])


def test_template_of_the_page_is_that_of_the_examples(page: list[Block]) -> None:
    from tiny_models import CHAT_TEMPLATE

    assert page
    assert Path("template.jinja").read_text().strip() == CHAT_TEMPLATE.strip()


def test_template_without_marks_stops_the_run(page: list[Block], monkeypatch: pytest.MonkeyPatch):
    from energon_lite import FatalSampleError

    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text() * 10)
    tokenizer = tiny(monkeypatch, Path("chats.jsonl").read_text().splitlines())
    mark, end = "{% generation %}", "{% endgeneration %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(mark, "").replace(end, "")
    code = page[0].code.partition("    trainer = ")[0].replace("num_workers=2", "num_workers=0")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code.replace("num_streams=8", "num_streams=1"), names)
    with pytest.raises(FatalSampleError, match="first 10 inputs"):
        next(iter(names["get_savable_loader"](names["dataset"])))


def test_blend_of_the_page_has_weights_and_a_file_for_validation(page, monkeypatch):
    from draw_data import write_chats

    from energon_lite.loss import WeightedLabels

    for number, name in enumerate(("chats", "more_chats", "val_chats"), start=1):
        write_chats(Path(f"{name}.jsonl"), 50 * number)
    tiny(monkeypatch, Path("chats.jsonl").read_text().splitlines())
    names: dict[str, Any] = {"__name__": "__main__"}
    code = page[0].code.partition("    trainer = ")[0].replace('"chats.jsonl"', '"chats.yaml"')
    code = code.replace("num_workers=2", "num_workers=0").replace("4096", "128")
    exec(code.replace("    packing =", "    add_loss_weights = True\n    packing ="), names)
    loader = names["get_savable_loader"](names["dataset"])
    batch = next(iter(loader))
    assert isinstance(batch["labels"], WeightedLabels)
    assert set(batch["labels"]["loss_weights"].unique().tolist()) == {0, 0.5, 1}
    assert [figures.target_share for figures in loader.stats().values()] == [0.75, 0.25]

    exec(page[3].code.partition("\n\n\n")[0], names)
    encoder = names["ChatEncoder"](names["tokenizer"])
    validation = names["get_val_dataset"]("chats.yaml", batch_size=2, task_encoder=encoder)
    assert len(validation) > 1
