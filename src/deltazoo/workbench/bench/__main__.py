"""`python -m deltazoo.workbench.bench`: the same as `deltazoo bench`, without the packages that only training needs."""

from deltazoo.workbench.bench.command import app

if __name__ == "__main__":
    app(prog_name="python -m deltazoo.workbench.bench")
