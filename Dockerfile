# titanlite in a container, by the commands in docs/howto.md. This file was not built or run by us.
#
# The official Python image has a C compiler, which torch.compile needs. PyPI's torch brings its CUDA libraries; the
# host needs an NVIDIA driver and the NVIDIA Container Toolkit.
FROM python:3.12

WORKDIR /opt/titanlite
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE run_train.sh ./
COPY titanlite titanlite
COPY train_configs train_configs
COPY assets/tokenizer assets/tokenizer
COPY assets/chat_template.jinja assets/
RUN pip install --no-cache-dir '.[data,float8,tokenizer]'

# Paths in a TOML file are relative to this folder: mount the host's folder here.
WORKDIR /work
ENTRYPOINT ["/opt/titanlite/run_train.sh"]
CMD ["debug"]
