# A router: the base install, without torch, compiled. --build-arg EXTRAS=[envoy] adds what the endpoint picker needs.
FROM python:3.11 AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE warmroute.py ./
COPY router router
COPY replica replica
COPY sim sim
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG EXTRAS=""
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/warmroute-*.whl)${EXTRAS}"
RUN useradd --system warmroute
USER warmroute
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
ENTRYPOINT ["warmroute"]
CMD ["serve", "/etc/warmroute/router.yaml"]
