"""Secrets stay out of what is logged, and what merely looks like one stays in."""

import pytest

from fulgurite.callbacks.masking import is_sensitive, mask_arguments, mask_text, mask_value


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "HF_TOKEN",
        "hub_token",
        "use_auth_token",
        "github_token",
        "access_tokens",
        "secret",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "api_key",
        "OPENAI_API_KEY",
        "apikey",
        "openaiApiKey",
        "private_key",
        "password",
        "MLFLOW_TRACKING_PASSWORD",
        "db.passwd",
        "credentials",
        "model.init_args.api_key",
        "db_pwd",
    ],
)
def test_names_of_secrets(name):
    assert is_sensitive(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "data.tokenizer",
        "num_tokens",
        "tokens_seen",
        "tokens_per_second",
        "max_new_tokens",
        "eos_token",
        "pad_token",
        "bos_token_id",
        "token_byte_lengths",
        "unit_tokens",
        "PWD",
        "OLDPWD",
        "key",
        "num_key_value_heads",
        "monkey",
        "author",
        "learning_rate",
    ],
)
def test_names_of_no_secrets(name):
    assert not is_sensitive(name)


def test_text(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "abcdefgh12345678")
    monkeypatch.setenv("HARMLESS", "abcdefgh-harmless")
    cases = {
        "http://user:pa55@host:5000/x": "http://***@host:5000/x",
        "postgresql+psycopg2://me:pw@db/mlflow": "postgresql+psycopg2://***@db/mlflow",
        "http://host:5000/a@b": "http://host:5000/a@b",
        "with abcdefgh12345678 inside": "with *** inside",
        "abcdefgh-harmless": "abcdefgh-harmless",
        "hf_abcdefghijklmnopqrstuv": "***",
        "key sk-proj-abcdefghijklmnop1234 end": "key *** end",
        "ghp_abcdefghijklmnopqrstuvwx": "***",
        "AKIAIOSFODNN7EXAMPLE": "***",
        "api_key=xyz other=1": "api_key=*** other=1",
        "{'password': 'xyz', 'eos_token': '</s>'}": "{'password': '***', 'eos_token': '</s>'}",
        "token: null": "token: null",
        "tokenizer: gpt2, max_tokens: 100": "tokenizer: gpt2, max_tokens: 100",
        "--learning_rate 1e-3": "--learning_rate 1e-3",
    }
    assert {text: mask_text(text) for text in cases} == cases


def test_nested_values():
    config = {
        "model": {"init_args": {"api_key": "xyz", "learning_rate": 1e-3, "eos_token": "</s>"}},
        "servers": [{"url": "https://a:b@host", "password": "p"}, {"url": "https://host", "password": None}],
        "hub_token": "",
        "tokens": [1, 2],
    }
    assert mask_value("", config) == {
        "model": {"init_args": {"api_key": "***", "learning_rate": 1e-3, "eos_token": "</s>"}},
        "servers": [{"url": "https://***@host", "password": "***"}, {"url": "https://host", "password": None}],
        "hub_token": "",
        "tokens": [1, 2],
    }


def test_command_lines():
    command = (
        "lightning run x --hub_token abc --model.api_key=abc data.password=abc --eos_token </s> --uri=http://u:p@h"
    )
    masked = "lightning run x --hub_token *** --model.api_key=*** data.password=*** --eos_token </s> --uri=http://***@h"
    assert mask_arguments(command.split()) == masked.split()
    assert mask_arguments(["--use_token", "--other", "1"]) == ["--use_token", "--other", "1"]
