"""A project of Django in a folder."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

ROOT = Path(__file__).parents[2]
SETTINGS = """
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": "{dbname}", "USER": "{user}", "PASSWORD": "{password}",
    "HOST": "{host}", "PORT": "{port}",
}}}}
INSTALLED_APPS = ["shop"]
SECRET_KEY = "only for this test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""


class Project:
    """A project in a folder, with the app `shop`.

    Args:
        url: of its database.
        files: their text by name.
        settings: more of them, as Python.
    """

    def __init__(self, folder: Path, url: str, files: Mapping[str, str], settings: str = "") -> None:
        given = {"password": "", **{name: str(value) for name, value in conninfo_to_dict(url).items()}}
        self.folder = folder
        for name, text in {"project.py": SETTINGS.format(**given) + settings, "shop/__init__.py": "", **files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def manage(self, *arguments: str, code: int = 0) -> str:
        """Run a command of Django, and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "project",
                "PYTHONPATH": f"{self.folder}:{ROOT}",
                "DJANGO_ALLOW_ASYNC_UNSAFE": "",  # other tests of this process may have set it
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
