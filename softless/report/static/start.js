showTheme();
begin();
