"""The doctor reports every kernel on every device, with a reason where it cannot run."""

from __future__ import annotations

import json

import pytest
import torch

from tilewise import dispatch, doctor


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


def test_it_is_json(found):
    assert json.loads(json.dumps(found)) == found


def test_every_kernel_is_tried_on_every_device(found):
    pairs = {(entry["kernel"], entry["device"]) for entry in found["kernels"]}
    devices = [entry["device"] for entry in found["devices"]]
    assert pairs == {(kernel.name, device) for kernel in dispatch.KERNELS for device in devices}


def test_a_reason_is_given_exactly_where_a_kernel_cannot_run(found):
    assert all(entry["available"] == (entry["reason"] is None) for entry in found["kernels"])


def test_the_cpu_kernels_run_everywhere(found):
    on_cpu = [e for e in found["kernels"] if e["device"] == "cpu" and e["kernel"].startswith("cpu/")]
    assert on_cpu and all(entry["available"] for entry in on_cpu)


def test_versions_name_what_is_installed(found):
    assert found["versions"]["torch"] == torch.__version__


def test_a_missing_package_has_no_version(monkeypatch):
    def nothing_installed(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", nothing_installed)
    assert doctor.versions()["triton"] is None


def test_features_are_the_support_table(found):
    assert found["features"] == dispatch.support_table()
