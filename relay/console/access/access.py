"""The access of one console: what its kind of authentication is made of."""

import math
from typing import assert_never

from anyio import CapacityLimiter

from relay.config.settings import Authentication, ConsoleSettings
from relay.console.access.identity import Identifier
from relay.console.access.login_limit import LoginLimit
from relay.console.access.oidc import Provider
from relay.console.access.passwords import MOST_CHECKS, PasswordFile
from relay.console.access.proxy import proxy_identifier
from relay.console.access.sessions import Sessions
from relay.console.access.start_token import StartToken
from relay.console.access.tokens import TokenFile, with_tokens


class Access:
    """How this console finds out who asks.

    Attributes:
        console: its settings.
        identify: finds out the user of a request.
        sessions: the logins; unused where each request says who sends it.
        passwords: the users, with authentication `password`.
        checks: how many passwords are checked at once; others wait without a thread.
        provider: who knows the users, with authentication `oidc`.
        limit: of failed logins.
        start: what a browser or a program has to bring, with authentication `none`.
    """

    def __init__(self, console: ConsoleSettings) -> None:
        self.console = console
        self.passwords = PasswordFile(console.users)
        self.checks = CapacityLimiter(MOST_CHECKS)
        self.provider = Provider(console)
        self.limit = LoginLimit()
        self.sessions = Sessions(console.session_timeout)
        self.start: StartToken | None = None
        identify: Identifier
        owners = [TokenFile(console.tokens).owner_of]
        match console.authentication:
            case Authentication.NONE:
                self.start = StartToken()
                owners.insert(0, self.start.owner_of)
                self.sessions = Sessions(math.inf)  # they end with the process, as the token does
                identify = self.sessions.identify
            case Authentication.PROXY:
                identify = proxy_identifier(console)
            case Authentication.PASSWORD:
                self.sessions = Sessions(console.session_timeout, self.passwords.holds)
                identify = self.sessions.identify
            case Authentication.OIDC:
                identify = self.sessions.identify
            case _:
                assert_never(console.authentication)
        self.identify = with_tokens(identify, *owners)
