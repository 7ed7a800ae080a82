# fullshard beside torch's build for CPUs. A test runs these commands in an empty environment (tests/procs/test_package.py);
# the image itself was not built.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /fullshard
COPY . .
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python -m pip install --no-cache-dir -c constraints.txt torch numpy
RUN python -m pip install --no-cache-dir --no-deps .
CMD ["torchrun", "--standalone", "--nproc-per-node", "2", "examples/quickstart.py"]
