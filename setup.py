"""Maps the folders at the root to the subpackages of torch_mlc; everything else is in pyproject.toml.

The rooms of the house stand at the root of the repository (ir/, scheduler/, …), but installed they are
torch_mlc.ir, torch_mlc.scheduler, …, so that no top-level package named `codegen` reaches site-packages.
"""

from setuptools import find_packages, setup

SUBPACKAGES = ("ir", "scheduler", "codegen", "runtime", "dynamo_backend")

package_dir, packages = {"torch_mlc": "src/torch_mlc"}, ["torch_mlc"]
for name in SUBPACKAGES:
    package_dir[f"torch_mlc.{name}"] = name
    packages += [f"torch_mlc.{name}", *(f"torch_mlc.{name}.{sub}" for sub in find_packages(name))]

# The pages, for `torch-mlc docs`.
package_dir["torch_mlc.docs"] = "docs"
packages.append("torch_mlc.docs")

setup(packages=packages, package_dir=package_dir)
