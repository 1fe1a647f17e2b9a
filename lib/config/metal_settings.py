from lib.config.settings import *  # noqa: F403
