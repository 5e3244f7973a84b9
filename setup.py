"""Puts train_configs/, assets/tokenizer/ and assets/chat_template.jinja into the wheel, which lie beside the
package in the tree. The rest of the build is described in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """Copies what titanlite/config/shipped.py looks up. An editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("train_configs", "assets/tokenizer"):
                self.copy_tree(folder, str(Path(self.build_lib) / "titanlite" / folder))
            template = "assets/chat_template.jinja"
            self.copy_file(template, str(Path(self.build_lib) / "titanlite" / template))


setup(cmdclass={"build_py": BuildWithData})
