from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelined.cli import serve
from pipelined.cli.config_file import with_config_file
from pipelined.cli.main import _parser
from pipelined.errors import ConfigError

pytest.importorskip("yaml")


def parsed(*words: str) -> Any:
    arguments = _parser().parse_args(["serve", *words])
    arguments.argv = ["serve", *words]
    return with_config_file(arguments, "serve")


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "model: from-file\npp_size: 4\nport: 9000\napi-key: [a, b]\nlayer_partition: [1, 2, 3, 4]\n"
        "disable-radix-cache: true\ntrust_remote_code: false\nrequest_timeout: 2.5\nchunking:\n",
    )
    arguments = parsed("--config", config)
    assert (arguments.later_model, arguments.pp_size, arguments.port) == ("from-file", 4, 9000)
    assert arguments.api_keys == ["a", "b"]
    assert arguments.layer_partition == (1, 2, 3, 4)
    assert arguments.disable_radix_cache
    assert not arguments.trust_remote_code
    assert arguments.request_timeout_s == 2.5
    arguments = parsed("mine", "--config", config, "--pp", "2")
    assert (arguments.model, arguments.pp_size, arguments.port) == ("mine", 2, 9000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pp_sise: 2\n", "did you mean 'pp-size'"),
        ("config: other.yaml\n", "unknown option 'config'"),
        ("- a\n", "no mapping"),
        ("a: [\n", "no YAML"),
        ("port: {a: 1}\n", "of a kind"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed("--config", write(tmp_path, text))


def test_files_that_are_absent() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parsed("--config", "/nowhere.yaml")


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(serve.KEY, "from-the-environment")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    found = serve._settings(
        parsed("m", "--api-key", "k", "--served-model-name", "a", "b", "--chat-template", str(template))
    )
    assert found.api_keys == ("k", "from-the-environment")
    assert found.served_model_names == ("a", "b")
    assert found.chat_template == "{{ messages }}"
    assert serve._settings(parsed("m", "--watchdog-timeout", "0")).watchdog_timeout_s is None
    with pytest.raises(ConfigError, match="cannot be read"):
        serve._settings(parsed("m", "--chat-template", str(tmp_path / "none")))


def test_without_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.KEY, raising=False)
    from pipelined.cli import main

    assert main(["serve"]) == 2
    assert "no model" in capsys.readouterr().err
    assert main(["serve", "m", "--host", "0.0.0.0"]) == 2
    assert "--allow-anonymous" in capsys.readouterr().err


def test_without_the_web_framework_the_line_that_installs_it_is_told() -> None:
    script = (
        "import sys; sys.modules['fastapi'] = sys.modules['uvicorn'] = None\n"
        "from pipelined.cli import main; sys.exit(main(['serve', 'toy://']))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 2
    assert "pip install 'pipelined[serve]'" in found.stderr
