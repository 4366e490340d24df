"""Safe by default: what is kept is private, servers stay on loopback, Dask is encrypted, and files run nothing."""

from __future__ import annotations

import ast
import os
import pickle
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import dask.config
import distributed
import pytest
import torch
from distributed.security import Security
from torch.distributed.checkpoint import state_dict_saver

from dejavu.foundation.dask_workers import ALLOW_PLAIN, check_encrypted
from dejavu.foundation.errors import InputError
from dejavu.runtime.state import read_checkpoint
from dejavu.trials import TrialError, client_of
from flows import server_settings
from flows.processes import child_environment
from flows.room import keep_private, open_to_others
from tests.test_flow import command
from tests.test_flow import project as project  # a fixture

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("dejavu", "tasks", "flows") for path in (ROOT / folder).rglob("*.py"))

# What runs what a file or a text says, and where that is wanted.
RUNS = {"eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"}
RUNS |= {"joblib.load", "marshal.loads", "shelve.open", "yaml.load", "os.system", "os.popen", "torch.jit.load"}
RUNS |= {"pd.read_pickle", "pandas.read_pickle", "runpy.run_path", "mlflow.pytorch.load_model"}
REASONED = {
    "dejavu/runtime/job/checkpoint_reader.py: pickle.Unpickler": "takes torch's own records alone, the tests below",
    "tasks/planning.py: task": "Prefect's cache of plans in .dejavu, private, and never taken from a backup",
}


def dangers(path: Path, root: Path = ROOT) -> Iterator[str]:
    """What in this file could run what it reads: the file and the name of what is called, or is made a class of."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names = [name for base in node.bases if (name := ast.unparse(base)).endswith("Unpickler")]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            names = [name] if is_dangerous(name, {one.arg: ast.unparse(one.value) for one in node.keywords}) else []
        else:
            continue
        yield from (f"{path.relative_to(root)}: {name}" for name in names)


def is_dangerous(name: str, keywords: dict[str | None, str]) -> bool:
    return (
        name in RUNS
        or name.endswith("Unpickler")
        or keywords.get("shell") not in (None, "False")
        or keywords.get("allow_pickle") not in (None, "False")
        or (name == "np.load" and "allow_pickle" not in keywords)
        or (name == "torch.load" and keywords.get("weights_only") != "True")
        or "pickle" in keywords.get("result_serializer", "")
    )


def test_no_code_runs_what_a_file_says() -> None:
    assert {danger for path in SOURCES for danger in dangers(path)} == set(REASONED)


def test_the_search_for_dangers_finds_them(tmp_path: Path) -> None:
    lines = ["pickle.loads(b)", "torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p)", "eval(t)"]
    lines += ["subprocess.run(t, shell=True)", "pickle.Unpickler(f).load()", "yaml.load(t)"]
    harmless = ["torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)", "model.eval()", "re.compile(t)"]
    (tmp_path / "one.py").write_text("\n".join([*lines, *harmless]))
    assert len(list(dangers(tmp_path / "one.py", tmp_path))) == len(lines)


# Checkpoints


class Touch:
    """A pickle of it makes the file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = {
        "model.block0.weight": torch.arange(12.0).reshape(3, 4),
        "model.block1.scale": torch.ones(2, dtype=torch.bfloat16),
        "optimizer.block0.weight.step": torch.tensor(3.0),
    }
    state_dict_saver.save(dict(state), checkpoint_id=tmp_path / "step-1", no_dist=True)
    return tmp_path / "step-1", state


def test_a_checkpoint_is_read_as_it_was_saved(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = checkpoint
    found = read_checkpoint(folder, {"block0", "block1"})
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_hostile_checkpoint_runs_nothing(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = checkpoint
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Touch(tmp_path / "ran")}))
    with pytest.raises(InputError, match=r"it names 'posix.mkdir'; .* Nothing in it was run"):
        read_checkpoint(folder, {"block0"})
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_leads_to_no_other_file(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = checkpoint
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="wanted files of the checkpoint's own folder"):
        read_checkpoint(folder, {"block0"})


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"not a pickle", pickle.dumps([1, 2])])
def test_a_damaged_list_of_tensors_is_said(checkpoint: tuple[Path, dict[str, torch.Tensor]], content: bytes) -> None:
    folder, _ = checkpoint
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match="wanted a checkpoint's list of tensors"):
        read_checkpoint(folder, {"block0"})


# Dask


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "10.0.0.1:8786", "ws://head:8786", "tcp://head:8786"])
def test_dask_on_another_host_is_encrypted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_PLAIN, raising=False)
    with pytest.raises(InputError, match=r"is on another host and not encrypted.*Wanted tls://"), client_of(address):
        pass
    monkeypatch.setenv(ALLOW_PLAIN, "1")
    check_encrypted(address)


@pytest.mark.parametrize(
    "address", ["", "tcp://127.0.0.1:8786", "localhost:8786", "tcp://[::1]:8786", "tls://10.0.0.1:8786", "inproc://1/2"]
)
def test_dask_here_or_encrypted_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_PLAIN, raising=False)
    check_encrypted(address)


@pytest.mark.parametrize("scheme", ["tls://", "tcp://", "wss://", ""])
@pytest.mark.parametrize(
    "place", ["", "head", "head:", ":8786", "head:x", "head:99999", "head:0", "[::1", "10.0.0.1", " "]
)
def test_what_is_no_address_of_dask_is_said(scheme: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's own client ended in a traceback."""
    monkeypatch.setenv(ALLOW_PLAIN, "1")
    if address := scheme + place:
        with pytest.raises(InputError, match="is no scheduler's address; wanted a host and a port"), client_of(address):
            pass


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Security]:
    """Certificates as files, and Dask's configuration that names them."""
    made = Security.temporary()
    paths = {}
    for name in ("ca_file", "client_cert", "client_key"):
        paths[name] = tmp_path / f"{name}.pem"
        paths[name].write_text(getattr(made, f"tls_{name}"))
    settings = {
        "distributed.comm.tls.ca-file": str(paths["ca_file"]),
        "distributed.comm.tls.client.cert": str(paths["client_cert"]),
        "distributed.comm.tls.client.key": str(paths["client_key"]),
    }
    with dask.config.set(settings):
        yield made


@pytest.mark.integration
def test_a_client_speaks_tls_by_dasks_configuration(tls: Security) -> None:
    options = {"host": "127.0.0.1", "n_workers": 1, "threads_per_worker": 1, "processes": False}
    with distributed.LocalCluster(**options, protocol="tls", security=tls, dashboard_address=None) as cluster:
        assert cluster.scheduler_address.startswith("tls://")
        with client_of(cluster.scheduler_address) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        with (
            dask.config.set(
                {f"distributed.comm.tls.{name}": None for name in ("ca-file", "client.cert", "client.key")}
            ),
            pytest.raises(TrialError, match=r"wanted distributed\.comm\.tls in Dask's configuration"),
            client_of(cluster.scheduler_address),
        ):
            pass


# Servers


@pytest.mark.parametrize("host", ["0.0.0.0", "everywhere", "::", "10.0.0.300"])
def test_a_host_is_one_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server_settings.AUTH, "admin:canary")
    with pytest.raises(InputError, match="wanted"):
        server_settings.check_host(host)


def test_other_hosts_reach_prefect_with_a_password_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server_settings.AUTH, raising=False)
    assert server_settings.check_host("localhost") == "127.0.0.1"
    with pytest.raises(InputError, match="Wanted PREFECT_SERVER_API_AUTH_STRING=user:password"):
        server_settings.check_host("10.0.0.5")
    monkeypatch.setenv(server_settings.AUTH, "admin:canary")
    assert server_settings.check_host("10.0.0.5") == "10.0.0.5"


def test_a_secret_goes_to_the_process_that_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(server_settings.AUTH, "admin:canary1")
    monkeypatch.setenv(server_settings.PREFECT_DATABASE, "postgresql://one:canary2@db:5432/prefect")
    monkeypatch.setenv(server_settings.MLFLOW_DATABASE, "postgresql://one:canary3@db:5432/mlflow")
    names = server_settings.given()
    assert names == server_settings.SECRETS
    assert not any("canary" in value for value in child_environment(tmp_path, {}).values())
    prefect, mlflow = server_settings.prefect_server(names), server_settings.mlflow_server(names, tmp_path)
    assert prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://one:canary2@db:5432/prefect"
    assert mlflow == {"MLFLOW_BACKEND_STORE_URI": "postgresql://one:canary3@db:5432/mlflow"}
    clients = server_settings.clients(names, "http://127.0.0.1:5000")
    assert clients == {"PREFECT_API_AUTH_STRING": "admin:canary1", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
    monkeypatch.delenv(server_settings.MLFLOW_DATABASE)
    with pytest.raises(InputError, match="started with DEJAVU_MLFLOW_DATABASE_URL"):
        server_settings.check_given(names)


def test_a_database_s_password_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server_settings.MLFLOW_DATABASE, "mysql://one:canary@db/mlflow")
    with pytest.raises(InputError, match="DEJAVU_MLFLOW_DATABASE_URL starts with 'mysql'") as caught:
        server_settings.given()
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("name", [server_settings.PREFECT_DATABASE, server_settings.MLFLOW_DATABASE])
@pytest.mark.parametrize("character", [*"[]⁈℀／：＠＃"])  # some are written as ?, /, :, @ or # in a normal form
def test_nor_is_it_where_its_url_cannot_be_read(character: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"postgresql://one:canary{character}@db/kept")
    with pytest.raises(InputError, match=f"{name} has a character that no URL has") as caught:
        server_settings.given()
    assert "canary" not in str(caught.value) and caught.value.__suppress_context__
    monkeypatch.setenv(name, f"postgresql://one:canary{quote(character)}@db/kept")
    assert server_settings.given() == (name,)


# What is kept


def test_state_is_taken_from_others(tmp_path: Path) -> None:
    (tmp_path / ".dejavu").mkdir()
    (tmp_path / "mlflow.db").touch()
    (tmp_path / ".dejavu").chmod(0o755)  # whatever this process's umask is
    (tmp_path / "mlflow.db").chmod(0o644)
    assert [path.name for path in open_to_others(tmp_path)] == [".dejavu", "mlflow.db"]
    keep_private(tmp_path)
    assert open_to_others(tmp_path) == []
    assert stat.S_IMODE((tmp_path / ".dejavu").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == 0o600


@pytest.mark.integration
def test_doctor_says_what_others_may_read(project: Path) -> None:
    (project / ".dejavu").mkdir(exist_ok=True)
    (project / ".dejavu").chmod(0o755)
    shown = command(project, sys.executable, "-m", "flows", "doctor")
    assert "others may read" in " ".join(shown.stdout.split())
    (project / ".dejavu").chmod(0o700)
