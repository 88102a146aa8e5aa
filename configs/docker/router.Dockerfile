# A router: the base install, without torch. --build-arg EXTRAS=[envoy] adds what the endpoint picker needs.
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE warmroute.py ./
COPY router router
COPY replica replica
COPY sim sim
ARG EXTRAS=""
RUN pip install --no-cache-dir ".${EXTRAS}"
RUN useradd --system warmroute
USER warmroute
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
ENTRYPOINT ["warmroute"]
CMD ["serve", "/etc/warmroute/router.yaml"]
