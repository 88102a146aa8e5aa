"""The tenants of a config: those written in it, and those in the file it names."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from replica.contract.yaml_file import YamlError, read_yaml
from router.config import RouterConfig
from router.config_errors import ConfigError, describe
from router.tenants_config import TenantConfig, problem_among

_LIST = TypeAdapter(tuple[TenantConfig, ...])


def read_tenants(config: RouterConfig) -> tuple[TenantConfig, ...]:
    """All of them, the file read now; none where ``tenants`` is not set. Raises ``ConfigError``."""
    tenants = config.tenants
    if tenants is None:
        return ()
    if tenants.file is None:
        return united_tenants(config, "")
    path = tenants.file
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"tenants.file: {path} cannot be read: {error.strerror}; expected a list of tenants"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"tenants.file: {path} is not UTF-8: {error.reason}") from None
    return united_tenants(config, text)


def united_tenants(config: RouterConfig, text: str) -> tuple[TenantConfig, ...]:
    """The config's own tenants and those in ``text``, the file's. Raises ``ConfigError``."""
    assert config.tenants is not None
    tenants, where = config.tenants.members, config.tenants.file
    if where is not None:
        tenants += _listed(text, where)
    problem = problem_among(tenants)
    if problem is not None:
        raise ConfigError(f"{where or 'tenants'}: {problem}")
    others = {key.get_secret_value() for key in (*config.keys.public, *config.keys.admin)}
    for tenant in tenants:
        if any(one.key.get_secret_value() in others for one in tenant.keys):
            raise ConfigError(
                f"{where or 'tenants'}: a key of {tenant.name} is one of keys.public or keys.admin, too; "
                "take it out of one of them"
            )
    return tenants


def _listed(text: str, where: str) -> tuple[TenantConfig, ...]:
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(f"{where}: expected a list of tenants ([] for none), got {type(data).__name__}")
    try:
        return _LIST.validate_python(data)
    except ValidationError as error:
        raise ConfigError(describe(error, where, text, TenantConfig)) from None
