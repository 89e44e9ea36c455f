"""Names in the larger Wikipedias that a dump does not contain, in lower case."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def phrases(text: str) -> frozenset[str]:
    return frozenset(text.split(", "))


# Old names of the file namespace, which are not in a dump's list of namespaces.
FILE_ALIASES = words("image bild imagen imagem immagine afbeelding grafika attēls kuva fil billede obrázok")

# Templates of disambiguation pages.
DISAMBIGUATION = phrases(
    "disambiguation, disambig, disamb, dab, hndis, geodis, numberdis, letter-number combination, schooldis, "
    "hospitaldis, disambiguation page, begriffsklärung, homonymie, desambiguación, desambiguação, disambigua, dp, "
    "doorverwijspagina, ujednoznacznienie, неоднозначность, багатозначність, aimai, 曖昧さ回避, 消歧义, 消歧義, "
    "disambig-cn, 동음이의, förgrening, gren, flertydig, täsmennyssivu, rozcestník, egyért, anlam ayrımı, "
    "ابهام‌زدایی, توضيح, פירושונים"
)

# Headings of reference sections, by language. Some are also used above prose; `is_passage` decides.
REFERENCE_HEADINGS = phrases(
    # English
    "references, external links, see also, further reading, bibliography, notes, sources, footnotes, citations, "
    "notes and references, references and notes, works cited, general references, selected bibliography, "
    # German
    "einzelnachweise, weblinks, literatur, siehe auch, quellen, anmerkungen, fußnoten, belege, nachweise, "
    "einzelnachweise und anmerkungen, anmerkungen und einzelnachweise, literatur und quellen, literaturhinweise, "
    # French
    "notes et références, références, notes, voir aussi, bibliographie, liens externes, lien externe, annexes, "
    "articles connexes, sources, sources et bibliographie, pour approfondir, "
    # Spanish
    "referencias, enlaces externos, véase también, bibliografía, notas, fuentes, notas y referencias, citas, "
    "lectura adicional, lecturas adicionales, bibliografía adicional, "
    # Italian, Portuguese, Dutch
    "note, bibliografia, voci correlate, altri progetti, collegamenti esterni, fonti, riferimenti, "
    "referências, bibliografia, ver também, ligações externas, notas, fontes, notas e referências, "
    "leitura adicional, leituras adicionais, "
    "referenties, bronnen, externe link, externe links, zie ook, literatuur, noten, voetnoten, "
    # Polish, Russian, Ukrainian
    "przypisy, bibliografia, linki zewnętrzne, zobacz też, uwagi, źródła, literatura, "
    "примечания, ссылки, литература, см. также, источники, сноски, комментарии, библиография, "
    "примітки, посилання, література, див. також, джерела, виноски, "
    # Swedish, Norwegian and Danish, Finnish
    "referenser, källor, externa länkar, se även, litteratur, noter, fotnoter, vidare läsning, "
    "referanser, eksterne lenker, se også, litteratur, kilder, noter, fotnoter, "
    "referencer, eksterne henvisninger, eksterne links, "
    "lähteet, viitteet, aiheesta muualla, katso myös, kirjallisuutta, "
    # Czech, Hungarian, Turkish, Vietnamese, Indonesian
    "reference, externí odkazy, literatura, související články, poznámky, odkazy, zdroje, "
    "jegyzetek, források, további információk, kapcsolódó szócikkek, irodalom, lásd még, "
    "kaynakça, dış bağlantılar, ayrıca bakınız, notlar, kaynaklar, "
    "tham khảo, chú thích, liên kết ngoài, xem thêm, ghi chú, đọc thêm, "
    "referensi, pranala luar, lihat pula, catatan kaki, bacaan lanjutan, "
    # Korean, Arabic, Persian, Hebrew
    "각주, 같이 보기, 외부 링크, 참고 문헌, 참고문헌, 출처, 주석, 함께 보기, "
    "مراجع, المراجع, وصلات خارجية, انظر أيضا, انظر أيضًا, مصادر, المصادر, هوامش, "
    "منابع, پانویس, جستارهای وابسته, پیوند به بیرون, "
    "הערות שוליים, קישורים חיצוניים, ראו גם, לקריאה נוספת, ביאורים"
) | words(  # Japanese, Chinese
    "脚注 参考文献 関連項目 外部リンク 注釈 出典 註釈 関連文献 関連書籍 注釈・出典 出典・脚注 "
    "参考文献 參考文獻 参考资料 參考資料 外部链接 外部連結 外部鏈接 参见 參見 参看 參看 相关条目 相關條目 注释 "
    "註釋 注釋 脚注 腳註 延伸阅读 延伸閱讀 来源 來源"
)
