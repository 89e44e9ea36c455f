"""scripts/setup_environment.sh: which Python environment is used, and when one is made."""

from launch_scripts import Checkout, assert_refused


def environment_calls(checkout: Checkout) -> list[str]:
    """What was made and installed, in short."""
    words = {"venv": "venv", "-r": "requirements", "--no-deps": "weights"}
    short = []
    for call in checkout.calls():
        torch = [word for word in call if word.startswith("torch==")]
        short += torch[:1] or [next(name for word, name in words.items() if word in call)]
    return short


def test_torch_is_installed_first_and_nothing_twice(checkout):
    assert checkout.run("bash scripts/setup_environment.sh tests").returncode == 0
    # python3 has all packages.
    assert checkout.calls() == [] and not (checkout.folder / ".venv").exists()
    for _ in range(2):
        result = checkout.run(
            "source scripts/setup_environment.sh && command -v python3", FAKE_LACKS="1"
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == str(checkout.folder / ".venv" / "bin" / "python3")
    venv, torch, requirements = environment_calls(checkout)
    assert (venv, requirements) == ("venv", "requirements")
    assert torch.startswith("torch==")
    checkout.run("bash scripts/setup_environment.sh tests", FAKE_LACKS="1")
    assert environment_calls(checkout)[3:] == ["requirements", "weights"]
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    assert len(checkout.calls()) == 5
    with (checkout.folder / "requirements.txt").open("a") as file:
        file.write("something>=1\n")  # makes another environment
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    assert environment_calls(checkout).count("venv") == 2


def test_an_interrupted_installation_continues(checkout):
    packages = checkout.folder / ".venv" / "lib" / "python3" / "site-packages"
    assert (
        checkout.run(
            "bash scripts/setup_environment.sh", FAKE_LACKS="1", FAKE_CODE_OF="torch"
        ).returncode
        == 2
    )
    for name, files in {
        "torch.dist-info": ["METADATA"],
        "numpy.dist-info": ["METADATA", "RECORD"],
    }.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    result = checkout.run("bash scripts/run_pretraining.sh", FAKE_LACKS="1")
    assert result.returncode == 2 and "run bash scripts/setup_environment.sh first" in result.stderr
    assert checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1").returncode == 0
    venv, torch, again, requirements = environment_calls(checkout)
    assert (venv, again, requirements) == ("venv", torch, "requirements")
    assert [path.name for path in packages.iterdir()] == ["numpy.dist-info"]
    assert (
        checkout.run(
            "bash scripts/setup_environment.sh tests", FAKE_LACKS="1", FAKE_CODE_OF="gt-"
        ).returncode
        == 2
    )
    assert checkout.run("bash scripts/setup_environment.sh tests", FAKE_LACKS="1").returncode == 0
    assert environment_calls(checkout)[4:] == ["requirements", "weights"] * 2


def test_an_environment_of_the_users_is_not_touched(checkout):
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert_refused(
        checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1"), checkout, ".venv"
    )
