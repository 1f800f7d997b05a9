"""The findings of the reference leaderboard, a part each."""
